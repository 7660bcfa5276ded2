"""Prepared TFDS folders from untrusted sources.

TFDS imports any feature class named in a folder's metadata and opens any file it describes. So the metadata is checked
first: only text and number features, and files inside the folder.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from google.protobuf import json_format
from google.protobuf.message import Message
from tensorflow_datasets.core.proto.dataset_info_generated_pb2 import DatasetInfo  # pyright: ignore[reportAttributeAccessIssue]
from tensorflow_datasets.core.proto.feature_generated_pb2 import Feature  # pyright: ignore[reportAttributeAccessIssue]

from gspo_jax import foreign
from gspo_jax.data.records import Record, Records
from gspo_jax.errors import UserError, choices

INFO_FILE, FEATURES_FILE = "dataset_info.json", "features.json"

_CONTENTS = {
    f"{cls.__module__}.{cls.__name__}": content
    for cls, content in {
        tfds.features.FeaturesDict: "features_dict",
        tfds.features.Sequence: "sequence",
        tfds.features.Text: "text",
        tfds.features.Scalar: "tensor",
        tfds.features.Tensor: "tensor",
        tfds.features.ClassLabel: "class_label",
    }.items()
}
"""Allowed feature classes, and their fields in TFDS's Feature message."""

_PLAIN = re.compile(r"[\w .+-]+")
"""Names that become file names."""
_PLAIN_TEMPLATE = re.compile(r"([\w.+-]|\{[A-Z_]+\})+")
"""Shard name templates, without format specs: `{SPLIT:>9999999999}` would fill the memory."""


def open_prepared(folder: str) -> tfds.core.DatasetBuilder:
    """Open a prepared TFDS folder without importing classes named in its metadata.

    Raises:
      UserError: the metadata is missing, damaged or names a class that is not allowed, or a file leads out of the
        folder.
    """
    for file in Path(folder).iterdir():
        if not file.is_dir():
            foreign.is_file(file, inside=folder)
    info_file, features_file = Path(folder) / INFO_FILE, Path(folder) / FEATURES_FILE
    info = DatasetInfo()
    _parse(info_file, info)
    if info.HasField("features"):  # TFDS would build these too
        _check_feature(info_file, info.features)
    features = Feature()
    _parse(features_file, features)
    _check_feature(features_file, features)
    if features.WhichOneof("content") != "features_dict":
        raise UserError(f"{features_file} describes one feature, not records with several; build it again")
    try:
        return tfds.builder_from_directory(folder)
    except Exception as error:  # TFDS raises whatever its parsers do
        reason = " ".join(str(error).split())
        raise UserError(f"{folder} is no data set that TFDS can open ({reason}); build it again") from error


def records(
    builder: tfds.core.DatasetBuilder, split: str, *, convert: Callable[[int, Any], Record], limit: int | None = None
) -> Records:
    """Return the records of a split in ArrayRecord format, read without TensorFlow."""
    splits = builder.info.splits
    if split not in splits:
        raise UserError(f"{builder.info.full_name} has no split {split!r}; {choices(split, list(splits))}")
    _check_shard_names(builder, split)
    try:
        source: Any = builder.as_data_source(split)  # type: ignore[call-arg]  # a decorator hides the signature
    except (NotImplementedError, FileNotFoundError, ValueError) as error:
        raise UserError(
            f"{builder.data_dir} cannot be read as ArrayRecord: {error!s:.200}; build it with "
            "file_format='array_record'"
        ) from error
    paths, lengths = splits[split].filepaths, splits[split].shard_lengths

    def where(index: int) -> str:
        for path, length in zip(paths, lengths, strict=True):
            if index < length:
                return str(path)
            index -= length
        raise IndexError(index)

    return Records(f"{builder.info.full_name}/{split}", source, convert=convert, where=where, limit=limit)


def _check_shard_names(builder: tfds.core.DatasetBuilder, split: str) -> None:
    info: Any = builder.info.splits[split]
    name, template = info.filename_template.dataset_name, info.filename_template.template
    for field, value, pattern in (("name", name, _PLAIN), ("filepathTemplate", template, _PLAIN_TEMPLATE)):
        if not pattern.fullmatch(value):
            file = Path(builder.data_dir) / INFO_FILE
            raise UserError(f"{file}: {field} is {value!r}, but shards are plain files of that folder; build it again")


def _parse(file: Path, message: Message) -> None:
    content = foreign.read_json(file, inside=file.parent, remedy="build the data set again")
    if content is None:
        raise UserError(f"{file} does not exist; build the data set again")
    try:
        json_format.ParseDict(content, message)
    except (ValueError, TypeError, RecursionError, json_format.Error) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file} is damaged, or not written by a current TFDS ({reason}); build it again") from error


def _check_feature(file: Path, feature: Any) -> None:
    name, content = feature.python_class_name, feature.WhichOneof("content")
    if name not in _CONTENTS:
        known = ", ".join(cls.rpartition(".")[2] for cls in _CONTENTS)
        raise UserError(
            f"{file} names the class {name!r}, whose code would be run; build the data set with TFDS's own {known} only"
        )
    if content != _CONTENTS[name]:  # JSON text could hide more classes
        raise UserError(f"{file} describes a {name} by {content!r} instead of {_CONTENTS[name]!r}; build it again")
    for key, inner in feature.features_dict.features.items():
        if not _PLAIN.fullmatch(key):
            raise UserError(f"{file} has a feature {key!r}; name features by letters, digits, spaces and _.+-")
        _check_feature(file, inner)
    if content == "sequence":
        _check_feature(file, feature.sequence.feature)
