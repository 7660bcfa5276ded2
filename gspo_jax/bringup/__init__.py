"""Bring-up of a machine: stages that try devices, kernels, rates and programs, each with a limit, and their page."""
