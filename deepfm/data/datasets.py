"""Which files make up a data set, and whether any are missing; finds them without TensorFlow."""

import fnmatch
import os
import posixpath
import re
from typing import Any, Dict, List, NamedTuple, Optional

from absl import logging

from deepfm.data import named_files
from deepfm.errors import BadInput
from deepfm.records import data_file, dataset_json
from deepfm.records.data_file import KINDS, DataFile
from deepfm.records.dataset_json import METADATA, UNFINISHED, SamplingRates
from deepfm.records.schema import Shape
from deepfm.records.storage import places
from deepfm.records.storage.places import is_remote

_SPLIT = re.compile(
    r"(?:^|/)(?:(train(?:ing)?)|(e?val(?:id|idation|uation)?)|(test(?:ing)?))(?=[-_./0-9]|$)"
)  # in a path
TEMPORARY, SUCCESS = "_temporary", "_SUCCESS"  # of Hadoop and Spark: while a job writes, and after


class DataSet(NamedTuple):
    """The files of a data set in reading order, and what is known of them.

    Attributes:
        files: DataFiles that hold at least one byte, sorted by path.
        data_format: a name in formats.FORMATS.
        field_size: F; None if no dataset.json gives it.
        feature_size: rows of the embedding tables; None if no dataset.json gives it.
        multi_valued: whether fields may hold several values or none; None if unknown.
        hash_buckets: number of buckets that ids are hashed into; 0: ids are not hashes; None:
            unknown.
        name: name of the data in messages.
        pipe: the pipe_mode.Pipe that is read instead of files, or None.
        own_channel: whether no other process of this host sees these records.
        sharded: whether no other host sees them.
        sampling_rates: SamplingRates; None if none are known.
        feature_map: fingerprint of the feature map that made the ids; None if unknown.
        weighted: whether records may hold the weight of an example; None if unknown.
        made: what is known of dataset_json.KEYS.
        whole: whether the files are all that their dataset.json describe.
    """

    files: List[DataFile]
    data_format: str
    field_size: Optional[int]
    feature_size: Optional[int]
    multi_valued: Optional[bool] = None
    hash_buckets: Optional[int] = None
    name: str = ""
    pipe: Optional[tuple] = None
    own_channel: bool = False
    sharded: bool = False
    sampling_rates: Optional[SamplingRates] = None
    feature_map: Optional[str] = None
    weighted: Optional[bool] = None
    made: Dict[str, Any] = {}
    whole: bool = False

    @property
    def format(self):
        """The formats.Format of its files."""
        from deepfm.data import formats  # which needs TensorFlow

        return formats.FORMATS[self.data_format]

    @property
    def rows(self):
        """Records in all files; None for a channel, or if the count of any file is unknown."""
        if self.pipe:
            return None
        counts = [f.rows for f in self.files]
        return None if None in counts else sum(counts)


class Found(NamedTuple):
    """What one entry of a flag's comma list finds.

    Attributes:
        spec: a directory, which is searched recursively, a glob or a file.
        is_directory: whether spec is a directory.
        paths: the files.
        folders: folders that may hold a dataset.json of these files.
    """

    spec: str
    is_directory: bool
    paths: List[str]
    folders: List[str]

    def covers(self, path: str) -> bool:
        """Whether the entry would find a file at this path."""
        if self.is_directory:
            return path.startswith(posixpath.join(self.spec, ""))
        names, patterns = path.split("/"), self.spec.split("/")
        return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def find(
    spec: str,
    flag: str,
    data_format: str = "auto",
    partial: bool = False,
    tables: bool = False,
    kinds: Dict[str, Any] = KINDS,
) -> DataSet:
    """Finds the data that a flag names, and refuses what cannot be data.

    Args:
        spec: a directory (searched recursively), a glob, or a comma list of these; local or s3://.
        flag: the flag's name, for messages.
        data_format: auto, or a name in formats.FORMATS.
        partial: whether a host may have only its part of the files that dataset.json names.
        tables: whether files may be Parquet or CSV.
        kinds: what tells the formats from one another: KINDS, or formats.FORMATS.

    Raises:
        BadInput: no file matches, all are empty, one in dataset.json is missing, formats are mixed,
            a file's name and compression disagree, it is of another kind, or it may not be read.
    """
    try:
        return _find(spec, flag, data_format, partial, tables, kinds)
    except (FileNotFoundError, PermissionError) as error:
        if is_remote(spec):  # the cause may be the server
            raise
        raise BadInput(f"--{flag}={spec}: {error.filename}; {error.strerror}.") from error


def _find(spec, flag, data_format, partial, tables, formats):
    entries = [_search(entry.strip(), flag, formats) for entry in spec.split(",")]
    paths = sorted({path for entry in entries for path in entry.paths})
    folders = sorted({*map(posixpath.dirname, paths)}.union(*(x.folders for x in entries)))
    for folder in folders:
        _check_finished(folder, f"--{flag}={spec}")
    named_files.warn_of_missing_hosts(paths, f"--{flag}={spec}")
    files, empty, seen = [], [], set()
    sizes = places.each(paths[0], lambda path: places.of(path).size(path), paths)
    for path, size in zip(paths, sizes):
        if not (is_remote(path) or os.path.isfile(path)):
            raise BadInput(f"{path}: a pipe or a device; write its content to a file first.")
        same = path if is_remote(path) else os.path.realpath(path)
        if same in seen:
            logging.warning("%s: named twice by --%s=%s, but read once.", path, flag, spec)
            continue
        seen.add(same)
        (files if size else empty).append(DataFile(path, size))
    if not files:
        raise BadInput(f"{empty[0].path}: empty (0 bytes), so --{flag}={spec} has no records.")
    for file in empty:
        logging.warning("%s is empty (0 bytes) and adds no records.", file.path)
    kinds = places.each(paths[0], lambda file: _format(file.path, tables, formats), files)
    found = {x.name for x in kinds if x} if data_format == "auto" else {data_format}
    if not found:
        raise BadInput(f"--{flag}={spec}: the files have no records ({files[0].path} is empty).")
    if len(found) > 1:
        titles = " and ".join(x.title for x in formats.values() if x.name in found)
        suffix = next(iter(formats.values())).suffixes[0]
        glob = f"name one kind, with a glob such as '{spec.rstrip('/')}/*{suffix}'."
        raise BadInput(
            f"--{flag}={spec} mixes {titles} files ({files[0].path}, {files[-1].path}); "
            + (glob if "," not in spec else "name files of one kind.")
        )
    _warn_of_repeated(entries, files, flag)
    if tables and list(formats)[-1] not in found:  # the one that takes what no other does
        raise BadInput(f"--{flag}={spec}: {files[0].path} is neither text nor Parquet.")
    said = {x: m for x, m in zip(folders, map(dataset_json.load, folders)) if m}
    there = set(paths) - {file.path for file in empty}
    covers = lambda path: any(entry.covers(path) for entry in entries)
    named_files.check_named(f"--{flag}={spec}", covers, there, said, _holds_data, partial)
    tops = [entry.spec.rstrip("/") for entry in entries]
    described = [_described(file, tops, said) for file in files]
    metadata = [m for _, m in described if m]
    unsaid = None if len(metadata) < len(files) else False
    any_says = lambda key: any(m.get(key) for m in metadata) or unsaid
    return DataSet(
        [file for file, _ in described],
        found.pop(),
        _agreed(metadata, "field_size", flag),
        max((m["feature_size"] for m in metadata), default=None),
        any_says("multi_valued"),
        _agreed([{"hash_buckets": 0, **m} for m in metadata], "hash_buckets", flag),
        f"--{flag}={spec}",
        sampling_rates=_sampling_rates(described),
        feature_map=_feature_map(described, flag),
        weighted=any_says("weighted"),
        made=dataset_json.merge({f.path: m or {} for f, m in described}),
        whole=len(files) == sum(len(m["files"]) for m in {id(m): m for m in metadata}.values()),
    )


def _warn_of_repeated(entries, files, flag):
    """Warns of records that are there twice, and of an entry that takes in several splits."""
    for first, *copies in data_file.same_content(files):
        logging.warning(
            "--%s: %s is a copy of %s: their records count more than once; delete one of them.",
            flag, " and ".join(file.path for file in copies[:3]), first.path,
        )  # fmt: skip
    for spec, is_directory, found, _ in entries:
        top = spec if is_directory else posixpath.dirname(re.split(r"[*?\[]", spec)[0])
        named = [(_SPLIT.search(path[len(top) :]), path) for path in sorted(found)]
        splits = sorted({split.lastindex: path for split, path in named if split}.items())
        if splits[1:]:
            logging.warning(
                "--%s=%s takes in %s and %s, by their names parts of several splits; name one "
                "split, such as %s.", flag, spec, splits[0][1], splits[1][1], splits[0][1],
            )  # fmt: skip


def _check_finished(folder, name):
    """Refuses (BadInput) a folder that a program is writing, or was when it was ended."""
    there = lambda mark: places.of(folder).exists(posixpath.join(folder, mark))
    if there(UNFINISHED):
        raise BadInput(
            f"{name}: writing the data set in {folder or '.'} was cut short ({UNFINISHED} is "
            "there); write it again with --overwrite."
        )
    if there(TEMPORARY) and not there(SUCCESS):
        raise BadInput(
            f"{name}: the job that writes {folder or '.'} is still running or was cut short "
            f"({TEMPORARY} is there, {SUCCESS} is not); wait for it, or run it again."
        )


def _feature_map(described, flag):
    """The feature map of all files, from [(file, its metadata or None)]; None if any lacks one."""
    checksum = _agreed([m for _, m in described if m], "feature_map", flag)
    without = [file.path for file, m in described if not (m and m.get("feature_map"))]
    if checksum and without:
        logging.warning(
            "--%s: its ids come from feature map %s, but no %s says that those of %s do.",
            flag, checksum, METADATA, without[0],
        )  # fmt: skip
    return None if without else checksum


def identified(data: DataSet, known: Optional[Dict[str, tuple]] = None) -> DataSet:
    """The data set with the Identity of every file; for `known` see identity.identify."""
    from deepfm.data import identity  # which needs TensorFlow

    found = identity.identify([file.path for file in data.files], known)
    return data._replace(files=[f._replace(identity=x) for f, x in zip(data.files, found)])


def _search(part, flag, formats) -> Found:
    """What an entry of a flag finds; BadInput if it finds nothing."""
    if not part:
        raise BadInput(f"--{flag} has an empty entry; give a directory, a glob or a file.")
    files = places.of(part)
    if files.is_dir(part):
        return _search_folder(part, flag, formats)
    # TensorFlow prefixes what it finds in the current folder with "./".
    pattern = part if posixpath.dirname(part) else posixpath.join(".", part)
    fixed = len(posixpath.dirname(re.split(r"[*?\[]", pattern)[0]))
    literal = "[" in pattern and files.exists(pattern)  # a file that is named like a pattern
    paths = [pattern] if literal else files.glob(pattern)
    paths = [x for x in paths if x == pattern or _holds_data(x[fixed:])]
    paths = [x for x, folder in zip(paths, places.each(part, files.is_dir, paths)) if not folder]
    folder = posixpath.dirname(part)
    if not paths and os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
        raise BadInput(f"--{flag}={part}: {folder} cannot be read (permission denied).")
    if not paths:
        raise BadInput(f"--{flag}={part}: no file matches.")
    return Found(pattern, False, paths, [])


def _search_folder(top, flag, formats):
    paths, folders = [], []
    for folder, inner, names in places.of(top).walk(top):
        below = folder[len(top) :]
        paths += [posixpath.join(folder, x) for x in names if _holds_data(posixpath.join(below, x))]
        if _hidden(below):
            looks_like_data = any(data_file.is_named(name, formats) for name in names)
            if looks_like_data and "/." not in below and TEMPORARY not in below:
                logging.warning("Not reading %s: names that begin with _ hide a folder.", folder)
            continue
        unfinished = UNFINISHED in names or TEMPORARY in (x.rstrip("/") for x in inner)
        if unfinished or METADATA in names:
            folders.append(posixpath.dirname(posixpath.join(folder, METADATA)))
    if not paths:
        for folder in folders:
            _check_finished(folder, f"--{flag}={top}")
        raise BadInput(f"--{flag}={top}: the directory has no data files.")
    return Found(top, True, paths, folders)


def _holds_data(path):
    """Whether a file found by a search holds data: it is neither hidden nor metadata."""
    of_map = posixpath.basename(path).startswith("feature_map.")  # and what lies beside it
    return not (_hidden(path) or of_map or path.endswith((".json", ".md", ".crc")))


def _hidden(path):
    """Whether a file or a folder above it is hidden by its name, as for Hadoop and Spark.

    Names that begin with `.` or `_` are (_SUCCESS, _temporary), but for partitions (_day=1).
    """
    names = path.split("/")
    return any(x.startswith(".") or (x.startswith("_") and "=" not in x) for x in names)


def _format(path, tables, formats):
    """The Format or Kind of a file, by its name or else by its first bytes, which it checks.

    None for a gzip file of nothing whose name does not tell the format.
    """
    # Of a format that others have added (docs/extending.md), the name alone tells.
    added = {name: x for name, x in formats.items() if name not in data_file.KINDS}
    head = data_file.head(path, tables or data_file.is_named(path, added))
    if not head and not data_file.is_named(path, formats):
        return None
    return data_file.kind_of(path, head[:12], formats)


def _described(file, tops, said):
    """(file with its counts, metadata) from the dataset.json, in {folder: its}, that describes it.

    It is beside the file, or in the folder of `tops` whose search found the file.
    """
    folder = posixpath.dirname(file.path)
    above = (top for top in tops if folder.startswith(f"{top}/"))
    for top in (folder, *above):
        metadata = said.get(top)
        entry = metadata and metadata["files"].get(file.path[len(top) :].lstrip("/"))
        if not entry:
            continue
        if entry["bytes"] != file.bytes:
            logging.warning(
                "%s has %d bytes, but %s says %d: another file or a part; ignoring its entry.",
                file.path, file.bytes, METADATA, entry["bytes"],
            )  # fmt: skip
            return file, None
        return file._replace(rows=entry["rows"], positives=entry["positives"]), metadata
    return file, None


def _sampling_rates(described):
    """The SamplingRates of files, from [(file, its metadata or None)]; None if unknown."""
    unknown = [file.path for file, m in described if not m]
    if unknown and any(m and m.get("sampling_rates") for _, m in described):
        logging.warning("The sampling rates are unknown: no %s describes %s.", METADATA, unknown[0])
    if unknown:
        return None
    return dataset_json.merge_rates(
        [(m.get("sampling_rates"), (f.rows - f.positives, f.positives)) for f, m in described]
    )


def _agreed(metadata, key, flag):
    values = sorted({m[key] for m in metadata if m.get(key) is not None})
    if len(values) > 1:
        raise BadInput(f"--{flag}: the data sets differ in {key}: {values}; name only one kind.")
    return values[0] if values else None


def first_record(data: DataSet) -> Shape:
    """What the first record with ids shows; files may lack one, as the gzip of an empty part."""
    kind = KINDS.get(data.data_format) or data.format
    shapes = map(kind.first_shape, (file.path for file in data.files))
    return next((shape for shape in shapes if shape.field_size), Shape())


def shows(data: DataSet, what: str) -> bool:
    """Whether data are `weighted` or `multi_valued`, by dataset.json or else the first record."""
    said = getattr(data, what)
    if said is None and data.files:
        return getattr(first_record(data), what)
    return bool(said)


def count_rows(data: DataSet) -> DataSet:
    """The data set with the rows of every file; counts those that no dataset.json describes."""
    if data.rows is not None:
        return data
    logging.info("Counting the records, because no dataset.json gives their number.")
    count = lambda file: file.rows if file.rows is not None else data.format.count(file.path)
    files = [file._replace(rows=count(file)) for file in data.files]
    return data._replace(files=files)
