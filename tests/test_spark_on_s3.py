"""The jobs on Spark read s3:// and write s3://, over a server that fails in several ways."""

import gzip
import json
import signal
import threading

import pytest
import s3_server
from conftest import started
from s3_server import Folder, Proxy, first
from test_on_spark import (
    ENVIRONMENT,
    PYTHON,
    content,
    libsvm_lines,
    one_machine,
    pytestmark,  # noqa: F401
    serving,
)
from test_prepare_criteo import criteo_rows, text_of


@pytest.fixture(scope="module")
def proxy():
    """The way to an S3 server, which `rule` can block."""
    with s3_server.started() as port, Proxy(port) as found:
        yield found


def settings(proxy):
    """The variables that say how to reach it."""
    return {name: proxy.env[name] for name in proxy.env if name.startswith(("AWS_", "S3_"))}


@pytest.fixture(scope="module")
def server(proxy):
    with serving(**settings(proxy)) as run:
        yield run


@pytest.fixture
def s3(proxy, tmp_path):
    """A folder of the server for each test; its rule is taken away after it."""
    yield Folder(proxy.port, tmp_path.name)
    proxy.rule = lambda method, name: None


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Inputs: text/, rows/ and beside it the columns of their table; records/ comes later."""
    top = tmp_path_factory.mktemp("raw")
    for name in ("text", "rows"):
        (top / name).mkdir()
    (top / "text" / "a.libsvm").write_text("\n".join(libsvm_lines(4000)))
    with gzip.open(str(top / "text" / "b.libsvm.gz"), "wt") as f:
        f.write("\n".join(libsvm_lines(600, seed=1)))
    (top / "rows" / "a.tsv").write_text(text_of(criteo_rows(1500)))
    kinds = ["label", *["buckets"] * 13, *["category"] * 26]
    columns = [{"name": f"c{i}", "kind": kind} for i, kind in enumerate(kinds)]
    (top / "table.json").write_text(json.dumps({"columns": columns}))
    return top


def uploaded(source, folder):
    """Copies the files of a local folder to one of the server."""
    for path in source.rglob("*"):
        if path.is_file():
            folder.write(str(path.relative_to(source)), path.read_bytes())
    return folder


def objects(folder):
    """{name: bytes} of the files in a folder of the server, without the mark of success."""
    names = [name for name in folder.names() if name and not name.endswith("/")]
    names.remove("_SUCCESS")
    return {name: folder.read(name) for name in names}


JOBS = {  # test_spark_cluster.py converts from S3 to S3
    "prepare": ("rows", {"min_count": 2, "columns": "table.json"}),
    "rebalance": ("records", {"num_files": 3}),
}


def test_an_object_that_s3_does_not_copy_at_once_is_moved(proxy, s3, monkeypatch):
    from deepfm.records.storage import arrow

    for name, value in settings(proxy).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(arrow, "_LARGEST_COPY", 10)
    s3.write("old", b"0123456789a")
    s3.write("new", b"to be replaced")
    arrow.move(f"{s3.path}/old", f"{s3.path}/new")
    assert [name for name in s3.names() if name] == ["new"]
    assert s3.read("new") == b"0123456789a"


def test_a_glob_passes_over_files_where_folders_should_be(proxy, s3, monkeypatch):
    from deepfm.records.storage import arrow

    for name, value in settings(proxy).items():
        monkeypatch.setenv(name, value)
    for name in ("a/x.svm", "b.svm", "c/y.txt"):
        s3.write(name, b"1")
    assert arrow.glob(f"{s3.path}/*/*.svm") == [f"{s3.path}/a/x.svm"]
    assert arrow.glob(f"{s3.path}/*/x.svm") == [f"{s3.path}/a/x.svm"]


@pytest.mark.parametrize("job", JOBS)
def test_from_s3_to_s3_each_job_writes_the_bytes_of_one_machine(
    server, proxy, s3, raw, tmp_path, monkeypatch, job
):
    name, options = JOBS[job]
    if job == "rebalance":
        one_machine(monkeypatch, "convert", input=raw / "text", output_dir=raw / name)
    source = uploaded(raw, Folder(proxy.port, f"{s3.name}/in"))
    out = Folder(proxy.port, f"{s3.name}/out")
    options_of = lambda top: {k: f"{top}/{v}" if k == "columns" else v for k, v in options.items()}
    refused = one_machine(
        monkeypatch, job, input=raw / name, output_dir=tmp_path / "alone", **options_of(raw)
    )
    assert refused is None
    # So often that a task fails, which Spark then tries again.
    proxy.rule = first(3, 500, "PUT", "/attempt-.*")
    answer = server(
        job, input=f"{source.path}/{name}", output_dir=out.path, **options_of(source.path)
    )
    assert answer["code"] == 0, answer
    assert objects(out) == content(tmp_path / "alone")
    assert 500 in [said for _, _, said in proxy.requests]


def test_a_job_that_fails_leaves_nothing_and_says_why(server, proxy, s3, raw):
    source = uploaded(raw / "text", Folder(proxy.port, f"{s3.name}/in"))
    out = Folder(proxy.port, f"{s3.name}/out")
    # The task of the first range is refused; others go on writing.
    refused = lambda method, name: method == "PUT" and name.endswith("/piece-0-0")
    proxy.rule = lambda method, name: 403 if refused(method, name) else None
    answer = server("convert", input=source.path, output_dir=out.path, num_files=20)
    assert answer["code"] == 1
    assert "a task failed 3 times, at last with OSError: When" in answer["said"]
    assert "ACCESS_DENIED" in answer["said"] and "\n" not in answer["said"]
    assert out.names() == []


def test_a_signal_ends_the_job_and_leaves_nothing_of_what_its_tasks_write(proxy, s3, raw):
    source = uploaded(raw / "text", Folder(proxy.port, f"{s3.name}/in"))
    out = Folder(proxy.port, f"{s3.name}/out")
    written, writing, go_on = set(), threading.Event(), threading.Event()

    def rule(method, name):
        """Holds a task back that has written something, until what it has written is deleted."""
        if method == "POST" and not name:  # several objects are deleted
            go_on.set()
        if method != "PUT" or "/attempt-" not in name:
            return None
        written.add(name)  # once, though the client sends again what it waits for too long
        if len(written) < 4:
            return None
        writing.set()
        return go_on

    proxy.rule = rule
    words = [
        PYTHON, "-m", "data_tools.on_spark", "convert", "--master=local[2,3]",
        f"--input={source.path}", f"--output_dir={out.path}", "--num_files=20",
    ]  # fmt: skip
    with started(words, env=dict(ENVIRONMENT, **settings(proxy))) as process:
        assert writing.wait(200)
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=200)
    assert process.returncode == 143, text
    assert text.endswith("on_spark.py: ended by SIGTERM; nothing was written.\n"), text
    assert "Traceback" not in text and "at org.apache" not in text
    assert len(written) < 21  # as many as all write: the tasks have been ended first
    assert out.names() == []


def test_a_data_set_is_replaced_only_where_it_is_asked_to(server, proxy, s3, raw):
    source = uploaded(raw / "text", Folder(proxy.port, f"{s3.name}/in"))
    out = Folder(proxy.port, f"{s3.name}/out")
    options = {"input": f"{source.path}/*.libsvm", "output_dir": out.path}
    out.write("notes.md", b"mine")
    assert server("convert", **options)["code"] == 0
    before = objects(out)
    assert sorted(before) == ["a.tfrecords", "dataset.json", "notes.md"]
    answer = server("convert", num_files=2, **options)
    assert answer["code"] == 2 and "--overwrite replaces it" in answer["said"]
    assert objects(out) == before
    assert server("convert", num_files=2, overwrite=True, **options)["code"] == 0
    assert sorted(objects(out)) == [
        "dataset.json", "notes.md", "part-00000-of-00002.tfrecords", "part-00001-of-00002.tfrecords"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options, code, words",
    [
        ({"input": "s3://bucket/none/*"}, 2, "no file matches"),
        ({"input": "s3://elsewhere/in"}, 2, "there is no bucket s3://elsewhere"),
        ({"output_dir": "s3://elsewhere/out"}, 1, "NO_SUCH_BUCKET"),
        ({"output_dir": "s3://bucket"}, 2, "is a whole bucket; give a folder"),
        ({"env": {"S3_ENDPOINT": "127.0.0.1:1"}}, 1, "NETWORK_CONNECTION"),
        ({"env": {"S3_ENDPOINT": "http://x:1/"}}, 2, "try S3_ENDPOINT=x:1 S3_USE_HTTPS=0."),
        ({"refused": 403}, 1, "ACCESS_DENIED"),
        ({"input": "gs://bucket/in"}, 2, "gs:// cannot be read or written here"),
        ({"input": "hdfs://name:8020/in"}, 2, "(ARROW_LIBHDFS_DIR and CLASSPATH not set)"),
    ],
)
def test_what_cannot_be_reached_is_said_in_one_sentence(
    server, proxy, s3, raw, options, code, words
):
    source = uploaded(raw / "text", Folder(proxy.port, f"{s3.name}/in"))
    refused = options.pop("refused", None)
    proxy.rule = lambda method, name: refused
    given = {"input": source.path, "output_dir": f"{s3.path}/out", **options}
    answer = server("convert", environment=given.pop("env", None), **given)
    assert (answer["code"], answer["said"].count("\n")) == (code, 0), answer
    assert words in answer["said"]
    assert code == 2 or answer["said"].endswith(" (AWS_REGION, AWS_*, S3_ENDPOINT).")
    assert Folder(proxy.port, f"{s3.name}/out").names() == []
