"""DeepFM as a classifier of scikit-learn, whose work the programs of this project do."""

import io
import json
import pathlib
import tempfile
import zipfile

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import assert_all_finite, check_array, check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from data_tools.click_logs import guessing
from deepfm.records import atomic_files
from deepfm_sklearn import children

_LABEL, _ROWS = "__label__", "X.parquet"
_ABOUT, _MAP = "classifier.json", "feature_map.json"  # in `model_`, beside model/
_NO_FLAGS = "columns", "validation_fraction", "split_by", "min_count", "flags", "verbose"


class DeepFMClassifier(ClassifierMixin, BaseEstimator):
    """A DeepFM for two classes.

    Rows are a pandas DataFrame, of whose columns prepare guesses what they are (docs/data.md), or
    an array, in which integers are the ids of categories. Cells may be missing.

    Args:
        columns: {column: its kind, such as "hash", or all that columns.json may say, such as
            {"kind": "number", "scale": "log"}}, for those that would be guessed wrong. The columns
            of an array are x0, x1, ...
        auto: whether the number of rows decides what is None below; else the defaults of train.py.
        embedding_size, ..., early_stopping_patience: flags of train.py.
        validation_fraction: of the rows, by which the best epoch is chosen; 0: the last one is.
        split_by, min_count: flags of prepare, for these rows and for rare categories.
        seed: the same rows and seed give the same model.
        flags: {name: value} of other flags of train.py, such as {"cowclip_ratio": 0.0002}.
        verbose: 0: nothing is shown; 1: a bar, if training takes a while; 2: the whole log.

    Attributes:
        classes_: the two labels, in order.
        report_: the report.json of the training, with its last evaluation.
        model_: bytes, what `save` writes.
    """

    def __init__(
        self, columns=None, auto=True, embedding_size=None, deep_layers=None, dropout=None,
        batch_norm=None, l2_reg=None, optimizer=None, learning_rate=None, batch_size=None,
        num_epochs=None, early_stopping_patience=None, validation_fraction=0.1, split_by="draw",
        min_count=None, seed=1, flags=None, verbose=1,
    ):  # fmt: skip
        vars(self).update({name: x for name, x in locals().items() if name != "self"})

    def _more_tags(self):
        return {"allow_nan": True, "binary_only": True, "X_types": ["2darray", "string"]}

    def fit(self, X, y):
        """Trains on rows [n, columns] and their labels [n].

        Raises:
            ValueError: a row, a label or a parameter is wrong; RuntimeError: the training failed.
        """
        rows, told = self._table(X, reset=True)
        check_consistent_length(X, y)
        check_classification_targets(y)
        labels = column_or_1d(y, warn=True)
        assert_all_finite(labels)
        self.classes_, labels = np.unique(labels, return_inverse=True)
        if len(self.classes_) != 2:
            found = f"{len(self.classes_)} class(es): {', '.join(map(str, self.classes_[:5]))}"
            raise ValueError(f"Only binary classification is supported; y has {found}.")
        with tempfile.TemporaryDirectory(prefix="deepfm-") as name:
            folder, data = pathlib.Path(name), pathlib.Path(name, "data")
            self._prepare(folder, rows.append_column(_LABEL, [labels]), told)
            flags = {k: x for k, x in self.get_params().items() if k not in _NO_FLAGS}
            self._run(
                folder, "deepfm", **{**flags, **(self.flags or {})}, model_dir=folder / "model",
                training_data_dir=data / "train", distribution="local", keep_checkpoint_max=1,
                val_data_dir=data / "valid" if (data / "valid").exists() else None,
            )  # fmt: skip
            self.report_ = json.loads((folder / "model" / "report.json").read_text())
            self.model_ = self._packed(folder)
        return self

    def predict_proba(self, X):
        """The probability of each of `classes_`, float64 [n, 2]; raises as `fit`."""
        check_is_fitted(self, "model_")
        rows, _ = self._table(X, reset=False)
        with tempfile.TemporaryDirectory(prefix="deepfm-") as name:
            folder, data = pathlib.Path(name), pathlib.Path(name, "data")
            with zipfile.ZipFile(io.BytesIO(self.model_)) as archive:
                archive.extractall(folder)
            parquet.write_table(rows, folder / _ROWS)
            encode = {"feature_map": folder / _MAP, "test_input": folder / _ROWS}
            self._run(folder, "data_tools.prepare", output_dir=data, **encode)
            self._run(
                folder, "deepfm", task_type="infer", infer_data_dir=data / "test",
                model_dir=folder / "model", predictions_file=folder / "y", distribution="local",
            )  # fmt: skip
            found = np.fromfile(folder / "y", sep=" ")
        return np.stack([1 - found, found], axis=1)

    def predict(self, X):
        """The more probable class of each row, [n]; raises as `fit`."""
        found = self.predict_proba(X)
        return self.classes_[found.argmax(axis=1)]

    def save(self, path):
        """Writes the classifier as it was fitted, whole or not at all.

        In the file, a zip, model/ is a --model_dir of train.py, feature_map.json one of prepare.
        """
        check_is_fitted(self, "model_")
        with atomic_files.open_whole(path) as file:
            file.buffer.write(self.model_)

    @classmethod
    def load(cls, path):
        """The classifier that `save` wrote; ValueError if the file is another one."""
        content = pathlib.Path(path).read_bytes()
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                params, fitted = json.loads(archive.read(_ABOUT))
        except (zipfile.BadZipFile, KeyError) as error:
            raise ValueError(f"{path} is not what DeepFMClassifier.save writes.") from error
        loaded, as_array = cls(**params), lambda x: np.array(x) if isinstance(x, list) else x
        vars(loaded).update({name: as_array(x) for name, x in fitted.items()}, model_=content)
        return loaded

    def _table(self, X, reset):
        """(the rows as pyarrow's Table, {column: what is told of it})."""
        if reset:
            self._check_feature_names(X, reset=True)
            self._check_n_features(X, reset=True)
        if hasattr(X, "columns"):
            table, ids = pa.Table.from_pandas(X, preserve_index=False), ()
        else:
            X = check_array(X, dtype=None, force_all_finite=False)
            self._check_n_features(X, reset=False)
            names = getattr(self, "feature_names_in_", [f"x{i}" for i in range(X.shape[1])])
            table, ids = pa.table(dict(zip(names, X.T))), names if X.dtype.kind in "iu" else ()
        for i, column in enumerate(table.schema):
            if pa.types.is_timestamp(column.type):
                table = table.set_column(i, column.name, table[i].cast(pa.string()))
        return table, {**dict.fromkeys(ids, "category"), **(self.columns or {})}

    def _prepare(self, folder, table, told):
        """Counts and encodes the rows of a table, labels included, into folder/data."""
        parquet.write_table(table, folder / _ROWS)
        valid, path = self.validation_fraction, folder / "data" / guessing.FILE
        flags = {
            "input": folder / _ROWS, "output_dir": path.parent, "label": _LABEL, "seed": self.seed,
            "split": f"{1 - valid:g},{valid:g},0", "split_by": self.split_by,
            "min_count": self.min_count or guessing.min_count(len(table)),
        }  # fmt: skip
        if told:
            self._run(folder, "data_tools.prepare", dry_run=True, **flags)
            content = json.loads(path.read_text())
            guessed = {column["name"]: column for column in content["columns"]}
            for name, kind in told.items():
                if name not in guessed:
                    there = ", ".join(x for x in guessed if x != _LABEL)
                    raise ValueError(f"columns: X has no column {name}, but {there}.")
                about = kind if isinstance(kind, dict) else {"kind": kind}
                guessed[name] = {"name": name, **about}
            path.write_text(json.dumps({**content, "columns": list(guessed.values())}))
            flags.update(columns=path, label=None)
        self._run(folder, "data_tools.prepare", **flags)

    def _packed(self, folder):
        """The zip file of what predictions and `load` need."""
        fitted = {k: x for k, x in vars(self).items() if k.endswith("_") and k != "model_"}
        best = folder / "model" / "best"
        of_checkpoint = best if best.exists() else folder / "model"
        paths = [folder / "model" / "model.json", of_checkpoint / "checkpoint"]
        content, plain = io.BytesIO(), lambda x: x.tolist() if hasattr(x, "tolist") else str(x)
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr(_ABOUT, json.dumps([self.get_params(), fitted], default=plain))
            archive.write(folder / "data" / _MAP, _MAP)
            for path in [*paths, *of_checkpoint.glob("model.ckpt-*")]:
                archive.write(path, f"model/{path.name}")
        return content.getvalue()

    def _run(self, folder, module, **flags):
        children.run(module, flags, str(folder), self.verbose)
