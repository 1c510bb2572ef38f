"""DeepFM as an estimator of scikit-learn: `from deepfm_sklearn import DeepFMClassifier`."""

from deepfm_sklearn.classifier import DeepFMClassifier  # noqa: F401
