"""Lines that name their fields, LibFFM's and LibSVM's with a map, and string ids."""

import json

import numpy as np
import pytest
from conftest import examples_of

from data_tools import libsvm_to_tfrecord, rebalance
from data_tools.libsvm import sources
from data_tools.libsvm_to_tfrecord import ConvertOptions
from deepfm.data import datasets, formats, records
from deepfm.errors import BadInput
from deepfm.records import codec, libsvm_text, text_blocks
from deepfm.runtime.tf import tf

FFM = """1 0:3:1 1:10:0.5 1:12:2 2:20:-1.5e-1
0 2:21:1 0:4:1 # 0:9:9
   # 1:2:3

0 1:11:0x10
0
1 2:22:1 1:13:1 0:5:1 1:14:3 1:15:4
"""
FFM_ROWS = [
    (1, [1, 2, 1], [3, 10, 12, 20], [1, 0.5, 2, -0.15]),
    (0, [1, 0, 1], [4, 21], [1, 1]),
    (0, [0, 1, 0], [11], [16]),
    (0, [0, 0, 0], [], []),
    (1, [1, 3, 1], [5, 13, 14, 15, 22], [1, 1, 3, 4, 1]),
]
RANGES = [("site", 0, 9), ("tags", 10, 19), ("user", 20, 29)]


@pytest.fixture
def convert(tmp_path):
    """convert(text, flag=value ...) -> [(label, counts, ids, values)] as it was written."""

    def run(text, **flags):
        (tmp_path / "in").mkdir(exist_ok=True)
        path = tmp_path / "in" / "a.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        options = ConvertOptions(str(path), str(tmp_path / "out"), **{"overwrite": True, **flags})
        (file,) = libsvm_to_tfrecord.convert(options)
        parts = "counts", "ids", "values"
        return [
            (*row["label"], *(row.get(part, []) for part in parts))
            for row in examples_of(file.path)
        ]

    return run


def field_map(tmp_path, fields=RANGES):
    path = tmp_path / "fields.json"
    keys = "name", "first_id", "last_id"
    path.write_text(json.dumps({"fields": [dict(zip(keys, field)) for field in fields]}))
    return str(path)


def check(found, wanted):
    assert [row[:3] for row in found] == [row[:3] for row in wanted]
    for (*_, values), (*_, expected) in zip(found, wanted):
        np.testing.assert_allclose(values, expected, rtol=1e-6)


@pytest.mark.parametrize("block", [1 << 20, 16])
def test_values_of_libffm_land_in_their_fields(convert, tmp_path, monkeypatch, block):
    monkeypatch.setattr(text_blocks, "BLOCK", block)
    check(convert(FFM, multi_valued=True), FFM_ROWS)
    found = datasets.find(str(tmp_path / "out"), "data")
    assert (found.field_size, found.feature_size, found.multi_valued) == (3, 23, True)


def test_fields_of_libsvm_are_told_by_a_map(convert, tmp_path):
    text = "".join(
        line.partition("#")[0].replace(" 0:", " ").replace(" 1:", " ").replace(" 2:", " ") + "\n"
        for line in FFM.replace("-0 ", "0 ").split("\n")
    )
    check(convert(text, multi_valued=True, fields=field_map(tmp_path)), FFM_ROWS)
    assert datasets.find(str(tmp_path / "out"), "data").feature_size == 30  # ids up to 29
    convert(text, multi_valued=True, fields=field_map(tmp_path), id_offset=1)
    assert datasets.find(str(tmp_path / "out"), "data").feature_size == 31


@pytest.mark.parametrize(
    "last_id, flags, words",
    [
        (29, {"feature_size": 25}, "--feature_size=25, but .*fields.json has ids up to 29; try --"),
        (2**31 - 1, {}, "fields.json: has ids up to 2147483647, but ids must be below 21474"),
    ],
)
def test_a_map_of_ids_that_the_table_lacks_is_refused(convert, tmp_path, last_id, flags, words):
    fields = field_map(tmp_path, [*RANGES[:2], ("user", 20, last_id)])
    with pytest.raises(BadInput, match=words):
        convert("1 3:1\n", multi_valued=True, fields=fields, **flags)


def test_a_field_of_one_value_at_most_has_its_place(convert):
    text = "1 2:22:1 0:5:2\n0 1:13:0.5\n0\n"
    places = [(1, [], [5, 0, 22], [2, 0, 1]), (0, [], [0, 13, 0], [0, 0.5, 0])]
    check(convert(text), [*places, (0, [], [0] * 3, [0] * 3)])
    check(convert(text, field_size=3, id_offset=1)[:1], [(1, [], [6, 0, 23], [2, 0, 1])])


def test_string_ids_are_hashed_as_in_serving(convert, tmp_path):
    names = ["é=ü", "x", "C1:7".replace(":", "_"), "#"[:0] + "a/b"]
    text = f"1 {names[0]}:0.5 {names[1]}:2 # one\n# two\n0 {names[2]}:1 {names[3]}:1\n"
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ids = session.run(records.hashed(tf.constant(names), 1000)).tolist()
    assert all(0 < i < 1000 for i in ids) and len(set(ids)) == 4
    check(convert(text, hash_buckets=1000), [(1, [], ids[:2], [0.5, 2]), (0, [], ids[2:], [1, 1])])
    found = datasets.find(str(tmp_path / "out"), "data")
    assert (found.hash_buckets, found.feature_size) == (1000, 1000)
    text = f"1 1:{names[0]}:0.5 0:{names[1]}:2 1:{names[2]}:1\n"
    rows = [(1, [1, 2], [ids[1], ids[0], ids[2]], [2, 0.5, 1])]
    check(convert(text, hash_buckets=1000, multi_valued=True), rows)


ONE, LINES = records.Schema(1), records.Schema(3, 50, True, named_fields=True)
MULTI = LINES._replace(pad=False, multi_valued=True)
MAP = MULTI._replace(named_fields=False, field_ids=((0, 10), (10, 20), (30, 40)))
HASHED = records.Schema(2, 50, hash_buckets=50)
WEIGHTED = records.Schema(2, 50, weighted=True)


@pytest.mark.parametrize(
    "line, schema, words",
    [
        ("1 0:3", LINES, ["'0:3' is not field:id:value"]),
        ("1 0:3:1:1", LINES, ["'1:1' is not a finite number"]),
        ("1 x:3:1", LINES, ["'x:3:1' is not field:id:value"]),
        ("1 -1:3:1", LINES, ["'-1:3:1' is not field:id:value"]),
        ("1 1234567:3:1", LINES, ["'1234567:3:1' is not field:id:value"]),
        ("1 0::1", LINES, ["'0::1' is not field:id:value"]),
        ("1 0:3:", LINES, ["'0:3:' is not field:id:value"]),
        ("1 :3:1", LINES, ["':3:1' is not field:id:value"]),
        ("1 0:3:one", LINES, ["'one' is not a finite number"]),
        ("1 0:-3:1", LINES, ["-3 is negative"]),
        ("1 0:50:1", LINES, ["50 is not below feature_size 50"]),
        ("1 3:5:1", LINES, ["field 3 (counted from 0) is beyond --field_size=3", "=4"]),
        ("1 0:0:1", LINES, ["id 0 is reserved", "--id_offset=1"]),
        ("1 0:3:1 0:4:1", LINES, ["field 0 has two values", "--multi_valued"]),
        ("2 0:3:1", MULTI, ["label '2'"]),
        ("0:1:1 0:3:1", MULTI, ["label '0:1:1'"]),
        ("1 25:1", MAP, ["feature id 25 belongs to no field"]),
        ("1 3", MAP, ["'3' is not id:value"]),
        ("1 a:1", HASHED, ["expected 2 id:value pairs, found 1"]),
        ("1 a:1 b:1 c:1", HASHED, ["expected 2", "found 3"]),
        ("1 a:1 :1", HASHED, ["':1' is not id:value"]),
        ("1 a:1 b:c:1", HASHED, ["not id:value"]),
        ("1 a:1 #b:1", HASHED, ["'#' begins a comment"]),
        ("1 a:1#c:1 b:1", HASHED, ["'#' begins a comment"]),
        ("1 0:3:1", ONE, ["LibFFM", "libsvm_to_tfrecord"]),
        ("2 1:1", ONE, ["label '2'", "0, 1, -1"]),
        ("1 x", ONE, ["'x'", "id:value"]),
        ("1 1:nan", ONE, ["'nan'", "finite"]),
        ("1 -4:1", ONE, ["-4", "negative"]),
        ("1 9223372036854775808:1", ONE, ["9223372036854775808", "2^63"]),
        ("1 2147483647:1", ONE, ["2147483647 is not below 2147483647: no table has more"]),
        ("1 7:1", ONE._replace(feature_size=7), ["7", "feature_size 7"]),
        ("1 6:1", records.Schema(1, 7, id_offset=1), ["7", "feature_size 7"]),
        ("1 1:1", records.Schema(2), ["expected 2", "found 1", "libsvm_to_tfrecord --pad"]),
        ("1 1:1 2:1", ONE._replace(pad=True), ["at most 1", "found 2"]),
        ("1 0:1", ONE._replace(pad=True), ["id 0", "--id_offset=1"]),
        ("1:-1 3:1 4:1", WEIGHTED, ["weight '-1' is not a finite number of at least 0"]),
        ("1:inf 3:1 4:1", WEIGHTED, ["weight 'inf' is not a finite number of at least 0"]),
        ("1:nan 3:1 4:1", WEIGHTED, ["weight 'nan' is not"]),
        ("1: 3:1 4:1", WEIGHTED, ["weight '' is not"]),
        ("1:0.5:2 3:1 4:1", WEIGHTED, ["weight '0.5:2' is not"]),
        (":0.5 3:1 4:1", WEIGHTED, ["label ':0.5' is not 0, 1, -1 or +1"]),
        ("2:0.5 3:1 4:1", WEIGHTED, ["label '2:0.5' is not 0, 1, -1 or +1"]),
        ("1:0.5 3:1", WEIGHTED, ["expected 2 id:value pairs, found 1"]),
        ("1:0.5 3:1", ONE, ["label '1:0.5' has a weight, but the first record has none"]),
        ("5:1 7:1 8:1", WEIGHTED, ["need one before each (for inference sed 's/^/0 /')"]),
    ],
)
def test_a_bad_line_is_refused_and_explained(line, schema, words):
    reason = libsvm_text.explain_line(line.encode(), schema)
    assert reason and all(word in reason for word in words), reason
    assert codec.decode_lines(line.encode() + b"\n", schema) is None


@pytest.mark.parametrize("schema", [LINES, MULTI])
def test_a_field_beyond_the_last_is_not_the_next_lines_first(schema):
    assert codec.decode_lines(b"1 3:5:1\n0 1:5:1\n", schema) is None


def test_a_bad_line_among_good_ones_is_named_and_may_be_skipped(convert, tmp_path):
    text = FFM + "1 0:1\n" + FFM
    with pytest.raises(BadInput, match=r"a.txt:8: '0:1' is not field:id:value: '1 0:1'"):
        convert(text, multi_valued=True)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    check(convert(text, multi_valued=True, max_bad_records=1), FFM_ROWS * 2)


@pytest.mark.parametrize(
    "text, words",
    [
        ("1 a:1 b:1\n0 c:1 #d:1\n", "a.txt:2: '#' begins a comment"),
        ("# of\n#it#\n\n1 a:1 b:1\n0 c:1 #d:1\n", "a.txt:5: '#' begins a comment"),
        ("1 -1:1:1 1:2:1\n", "a.txt:1: '-1:1:1' is not field:id:value"),
        ("# nothing\n\n", "no row holds an id:value pair"),
    ],
)
def test_a_file_of_bad_lines_alone_is_named(convert, text, words):
    flags = {"hash_buckets": 99} if "#d" in text else {"multi_valued": text.startswith("#")}
    with pytest.raises(BadInput, match=words):
        convert(text, **flags)


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"fields": "nowhere.json"}, "--fields=nowhere.json: cannot be read"),
        ({"input_format": "libffm", "fields": "x"}, "--fields does not go with LibFFM input"),
        ({"input_format": "libffm", "pad": True}, "--pad does not go with"),
        ({"hash_buckets": 9, "id_offset": 1}, "--id_offset does not go with --hash_buckets"),
        ({"hash_buckets": 9, "feature_size": 5}, "--feature_size does not go with"),
        ({"hash_buckets": 1}, "--hash_buckets=1 has only id 0"),
        ({"multi_valued": True}, "--multi_valued needs the field"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(convert, flags, words):
    with pytest.raises(BadInput, match=words):
        convert("1 1:1 2:1\n", **flags)


@pytest.mark.parametrize(
    "fields, words",
    [
        ([], "it has no fields"),
        ([("a", 0, 9), ("b", 9, 12)], "fields 0 and 1 share id 9"),
        ([("a", 5, 4)], "field 0 has ids from 5 to 4"),
        ([("a", "0", 4)], "field 0 has ids from 0 to 4"),
        ([("a", 0)], "KeyError"),
    ],
)
def test_a_bad_map_is_refused(tmp_path, fields, words):
    with pytest.raises(BadInput, match=words):
        sources.read_map(field_map(tmp_path, fields))


def test_rebalance_keeps_the_values_of_each_field(convert, tmp_path):
    rows = convert(FFM, multi_valued=True, num_files=1)
    options = rebalance.RebalanceOptions(f"{tmp_path}/out", f"{tmp_path}/mixed", num_files=2)
    files = rebalance.rebalance(options)
    read = lambda path: [payload for _, payload, _ in formats.TFRECORD.numbered(path)]
    before = [x for path in (tmp_path / "out").glob("*.tfrecords") for x in read(str(path))]
    assert sorted(x for file in files for x in read(file.path)) == sorted(before)
    assert len(before) == len(rows) == 5
    found = datasets.find(str(tmp_path / "mixed"), "data")
    assert (found.field_size, found.feature_size, found.multi_valued) == (3, 23, True)


def test_rebalance_remembers_that_ids_are_hashes(convert, tmp_path):
    convert("1 a:1 b:1\n0 c:1 d:1\n", hash_buckets=1000)
    rebalance.rebalance(rebalance.RebalanceOptions(str(tmp_path / "out"), str(tmp_path / "mixed")))
    assert datasets.find(str(tmp_path / "mixed"), "data").hash_buckets == 1000


@pytest.mark.parametrize("flags", [{}, {"multi_valued": True}, {"hash_buckets": 50}])
def test_an_empty_field_0_and_ids_that_fields_share_are_said(convert, caplog, flags):
    counted_from = lambda first, ids: "".join(
        f"{i % 2} {first}:{1 + i % 3}:1 {first + 1}:{ids + i % 4}:2\n" for i in range(24)
    )
    for first, ids in ((0, 50), (1, 50), (0, 1), (1, 1)):
        caplog.clear()
        convert(counted_from(first, ids), overwrite=True, **flags)
        said = "".join(x.getMessage() for x in caplog.records if x.levelname == "WARNING")
        assert ("No row has a value in field 0" in said) == (first == 1)
        if not flags.get("hash_buckets"):  # there, ids of 50 buckets may meet
            assert ("24 rows, 3 ids are in more than one field" in said) == (ids == 1)


@pytest.mark.parametrize(
    "flags", [{}, {"hash_buckets": 9}, {"pad": True}, {"fields": 1}, {"input_format": "libffm"}]
)
@pytest.mark.parametrize("line", ["1 qid:3 0:1:1", "\t0:2\vqid:3 1:1 # x", "1 qid:1"])
def test_query_groups_are_refused_by_every_reader_of_lines(convert, tmp_path, flags, line):
    if "fields" in flags:
        (tmp_path / "map.json").write_text('{"fields": [{"first_id": 0, "last_id": 5}]}')
        flags = {"fields": str(tmp_path / "map.json")}
    pair = "0:1:1" if "input_format" in flags else "1:1"
    flags = {"example_weights": True, **flags}
    with pytest.raises(BadInput, match=r":3: query groups are not supported; leave 'qid:\d' out"):
        convert(f"1 {pair}\n0 {pair}\n{line}\n1 {pair}\n", **flags)


def test_raw_cells_and_ids_of_64_bits_name_what_reads_them(convert):
    with pytest.raises(BadInput, match="data_tools.prepare --columns reads raw cells"):
        convert("0,41,a.com,5\n1,2,b.com,6\n")
