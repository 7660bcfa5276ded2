"""The tables of docs/plan.md and docs/plan/cycles.md, written from plans into the pages.

Each is between `<!-- table: NAME -->` and `<!-- end -->`, on any of the pages:

    python docs/draw/plan_tables.py docs/plan.md docs/plan/cycles.md --recipes PLAN PLAN … --choices PLAN …

Each PLAN is a file written by `python -m gspo_jax.plan --json=PLAN`. The first recipe is also shown in full.
`bash launch/plans.sh` makes all plans and then runs this.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gspo_jax import foreign
from gspo_jax.errors import UserError
from gspo_jax.parser import Parser
from gspo_jax.planning.show import cycles_table, markdown_table
from gspo_jax.studies.pages import replaced

Plan = Mapping[str, Any]
PARTS = ("attention", "grouped_matmul", "kernels", "matmul", "memory", "vector", "collectives", "latency")
"""Parts of executed time, in order."""
BETWEEN = "\0"
"""Separator of pages that are searched as one."""
ESTIMATED = ("update", "score", "sample_decode")
"""Programs whose executed times are shown beside the compiler's estimates."""


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"


def _config(plan: Plan) -> str:
    """The recipe that was planned: `configs/NAME.py[:arg]`."""
    return f"`{next(a.partition('=')[2] for a in plan['arguments'] if a.startswith('--config='))}`"


def _changes(plan: Plan) -> str:
    """The fields that a plan changes; "unchanged" without any."""
    changed = [a.removeprefix("--config.") for a in plan["arguments"] if a.startswith("--config.")]
    return ", ".join(f"`{field}`" for field in changed) or "unchanged"


def recipes(plans: Sequence[Plan]) -> list[str]:
    """One line per recipe: memory and times of its update and decode step."""
    head = ["`--config`", "`--topology`", "HBM per chip, GB", "`update`, GB", "Σ", "attention", "executed"]
    head += ["links, exposed", "bound by", "floor", "`sample_decode`, GB", "Σ", "executed", "floor"]
    rows = []
    for plan in plans:
        update, decode = plan["programs"]["update"], plan["programs"]["sample_decode"]
        t, d = update["seconds"], decode["seconds"]
        binds = {"hbm": "memory", "ici": "links"}.get(update["binds"], update["binds"])
        rows.append(
            [_config(plan), f"`{plan['topology']}`", _gb(update["limit_bytes"]), _gb(update["peak_bytes"])]
            + [_ms(t[name]) for name in ("per_op", "attention", "executed")]
            + [f"{_ms(t['ici'])}, {_ms(t['exposed'])}", binds, _ms(t["floor"])]
            + [f"{_gb(decode['peak_bytes'])} + {_gb(decode['resident_bytes'])}"]
            + [_ms(d[name]) for name in ("per_op", "executed", "floor")]
        )
    return markdown_table(head, rows)


def in_full(plan: Plan) -> list[str]:
    """One line per program of a recipe."""
    head = ["program", "memory, GB", "stays beside it, GB", "Tflop", "compute, with attention", "main memory"]
    head += ["links, exposed", "Σ", "attention", "executed", "floor", "projected"]
    rows = []
    for name, facts in plan["programs"].items():
        t = facts["seconds"]
        projected = [_ms(s) for s in facts["projected_step_s"] or (None, None)]
        rows.append(
            [f"`{name}`", _gb(facts["peak_bytes"]), _gb(facts["resident_bytes"]), f"{facts['flops'] / 1e12:.1f}"]
            + [_ms(t["compute"]), _ms(t["hbm"]), f"{_ms(t['ici'])}, {_ms(t['exposed'])}"]
            + [_ms(t[what]) for what in ("per_op", "attention", "executed", "floor")]
            + [" to ".join(projected)]
        )
    return markdown_table(head, rows)


def parts(plan: Plan) -> list[str]:
    """One line per program of a recipe: its executed time by kind of operation."""
    head = ["program", "executed", *(part.replace("_", " ") for part in PARTS)]
    rows = [
        [f"`{name}`", _ms(facts["seconds"]["executed"]), *(_ms(facts["executed_by"].get(part, 0.0)) for part in PARTS)]
        for name, facts in plan["programs"].items()
    ]
    return markdown_table(head, rows)


def choices(plans: Sequence[Plan]) -> list[str]:
    """One line per plan of an update with some fields changed."""
    head = ["`--config.…`", "memory, GB", "Σ", "attention", "executed", "links, exposed", "GB sent"]
    rows = []
    for plan in plans:
        facts = plan["programs"]["update"]
        t = facts["seconds"]
        times = [_ms(t[name]) for name in ("per_op", "attention", "executed")]
        links = f"{_ms(t['ici'])}, {_ms(t['exposed'])}"
        rows.append([_changes(plan), _gb(facts["peak_bytes"]), *times, links, _gb(facts["ici_bytes"])])
    return markdown_table(head, rows)


def read(path: str) -> Plan:
    """Read a plan.

    Raises:
      UserError: the file is not a plan that the command wrote.
    """
    try:
        foreign.is_file(path)
        plan = json.loads(Path(path).read_text(encoding="utf-8"))
        _ = plan["programs"], plan["topology"], _config(plan)
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise UserError(f"{path} is not a plan ({error!r}); make one: python -m gspo_jax.plan --json={path}") from None
    return plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser("python docs/draw/plan_tables.py", str(__doc__).partition("\n\n")[0])
    parser.add_argument("pages", nargs="+", metavar="PAGE", help="pages with the tables, such as docs/plan.md")
    parser.add_argument("--recipes", nargs="+", metavar="PLAN", required=True, help="plans of recipes, one a line")
    parser.add_argument("--choices", nargs="*", metavar="PLAN", default=[], help="the first with fields changed")
    return parser.run(_command, arguments)


def _command(given: Namespace) -> None:
    planned, varied = ([read(path) for path in paths] for paths in (given.recipes, given.choices))
    first = planned[0]
    tables: dict[str, Callable[[], list[str]]] = {
        "recipes": partial(recipes, planned),
        "in full": partial(in_full, first),
        "parts": partial(parts, first),
        "choices": partial(choices, [first, *varied]),
    }
    for name in ESTIMATED:
        tables[f"cycles of {name}"] = partial(cycles_table, first["programs"][name]["cycles"])
    pages = [Path(page) for page in given.pages]
    text = BETWEEN.join(page.read_text(encoding="utf-8") for page in pages)
    for name, lines in tables.items():
        text = replaced(text, name, lines())
    for page, new in zip(pages, text.split(BETWEEN), strict=True):
        page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
