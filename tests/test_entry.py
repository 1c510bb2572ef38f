"""How flags are read: every way that a shell, a notebook or SageMaker's toolkit writes them."""

import os

import pytest
from conftest import run_python, run_train

from deepfm.runtime import program


@pytest.mark.parametrize("word", ["True", "False", "true", "0", "no"])
def test_a_boolean_may_come_as_a_word_of_its_own(word):
    argv = program.join_boolean_words(
        ["train.py", "--batch_norm", word, "--seed", "1"], {"batch_norm"}
    )
    assert argv == ["train.py", f"--batch_norm={word}", "--seed", "1"]


def test_a_word_after_another_flag_or_a_lone_boolean_stays_as_it_is():
    argv = ["train.py", "--seed", "1", "--batch_norm", "--cache", "true"]
    assert program.join_boolean_words(argv, {"batch_norm"}) == argv


@pytest.mark.parametrize(
    "word, meant",
    [
        ("--model_dir=~/model", "--model_dir=/home/me/model"),
        ("--training_data_dir=~/a,b/~,~/c", "--training_data_dir=/home/me/a,b/~,/home/me/c"),
        ("--model_dir=a~", "--model_dir=a~"),
        ("--batch_norm", "--batch_norm"),
        ("~=~", "~=~"),
    ],
)
def test_a_tilde_is_the_home_folder(monkeypatch, word, meant):
    monkeypatch.setenv("HOME", "/home/me")
    assert program.expand_home(word) == meant


@pytest.mark.parametrize(
    "flags",
    [
        ["--batch_norm", "--nolazy_updates", "--l2_scope=table"],
        ["--batch_norm", "False", "--lazy_updates", "True"],
        ["--max_steps", "128.0", "--optimizer", "ADAM", "--dropout", "0.1,0.2,0"],
        ["--checkpoint_dir", "elsewhere", "--seed=4294967295"],
    ],
)
def test_flags_are_read_in_all_their_forms(flags, tmp_path):
    data = "--training_data_dir=~/missing.tfrecords,~/a"
    env = {**os.environ, "HOME": str(tmp_path)}
    done = run_train(*flags, f"--model_dir={tmp_path}/model", data, env=env, code=2)
    # All flags were accepted: what is left to complain about is the data.
    assert f"{tmp_path}/missing.tfrecords: no file matches" in done.stderr


@pytest.mark.parametrize(
    "flag, sentence",
    [
        ("--batch_sise=3", "Did you mean: batch_size"),
        ("--batch_size=3.5", "--batch_size=3.5"),
        ("--learning_rate=nan", "--learning_rate=nan: 'nan' is not a finite number"),
        ("--deep_layers=64,x", "a list of layer widths such as 256,128,64"),
        ("--loss_type=hinge", "log_loss|square_loss"),
        ("--lazy_updates=perhaps", "--lazy_updates=perhaps: give true or false.\n"),
        ("stray", "'stray' is not a flag"),
        ("--distribution=tower2", "--distribution=tower2"),
        ("--seed=4294967296", "--seed=4294967296"),
    ],
)
def test_a_wrong_flag_ends_with_code_2_and_one_sentence(flag, sentence):
    done = run_train(flag, "--model_dir=nowhere", code=2)
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_flagfile_may_name_another_and_what_comes_later_wins(tmp_path):
    (tmp_path / "base.flags").write_text("# of all\n\n--seed=3\n--batch_size=7\n// more\n-seed=4\n")
    (tmp_path / "own.flags").write_text(
        f"--batch_size=5\n--flagfile={tmp_path}/base.flags\n  --nobatch_norm  \n"
    )
    words = ["--seed=1", "--flagfile", f"{tmp_path}/own.flags", "--batch_norm"]
    expanded = program.with_flagfiles(words)
    assert expanded == [
        "--seed=1", "--batch_size=5", "--seed=3", "--batch_size=7", "-seed=4", "--nobatch_norm",
        "--batch_norm",
    ]  # fmt: skip
    done = run_train(*words, "--batch_sise=1")
    assert "Did you mean: batch_size" in done.stderr


@pytest.mark.parametrize(
    "content, sentence",
    [
        (None, "own.flags cannot be read (No such file or directory)."),
        (b"--lerning_rate=1\n", "Did you mean: learning_rate"),
        (b"--lerning_rate=1\n", " ? It is in --flagfile="),
        (b"--flagfile=gone.flags\n", "--flagfile=gone.flags cannot be read"),
        (b"--seed=\xff\n", "--flagfile: a file of flags is not text"),
        (b"--seed=1\nseed 2\n", "'seed 2' is not a flag"),
    ],
)
def test_a_bad_flagfile_ends_with_code_2_and_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "own.flags"
    if content is not None:
        path.write_bytes(content)
    done = run_train(f"--flagfile={path}", f"--model_dir={tmp_path}/model", code=2)
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_numpy_and_tensorflow_get_their_settings_in_time_and_what_the_user_has_set_stays():
    defaults = {"TF_XLA_FLAGS": "--tf_xla_clustering_fuel=0", "OPENBLAS_NUM_THREADS": "1"}
    code = (
        "import os, sys; from deepfm import __main__ as train; from deepfm.runtime import program\n"
        "show = lambda: print(*(x in sys.modules for x in ('numpy', 'tensorflow')), "
        f"*map(os.environ.get, {[*defaults]}))\n"
        "program.run(show, before_tensorflow=show)"
    )
    others = {name: value for name, value in os.environ.items() if name not in defaults}
    for own in ({}, {"TF_XLA_FLAGS": "--tf_xla_min_cluster_size=9", "OPENBLAS_NUM_THREADS": "2"}):
        done = run_python("-c", code, env={**others, **own}, fresh=True)
        set_so = [*{**defaults, **own}.values()]
        assert done.stdout.split() == ["False"] * 2 + set_so + ["True"] * 2 + set_so, done.stderr


def test_the_end_of_a_program_does_not_look_for_garbage():
    code = (
        "import atexit, gc; from deepfm.runtime import program\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        "program.run(lambda: None, tensorflow=False)"
    )
    done = run_python("-c", code, fresh=True)
    assert done.stdout == "True\n", done.stderr


def test_openmp_flags_without_mkl_say_that_they_do_nothing():
    done = run_train("--omp_num_threads=2", "--kmp_affinity=disabled", code=2)
    assert "have no effect: this TensorFlow is built without MKL" in done.stderr
    assert "--model_dir is missing" in done.stderr.splitlines()[-1]
