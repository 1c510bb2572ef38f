"""Trains, evaluates, explains, applies and exports a DeepFM.

    python train.py --training_data_dir=data/train --val_data_dir=data/val --model_dir=model
    python train.py --task_type=eval --val_data_dir=data/test --model_dir=model
    python train.py --task_type=importance --val_data_dir=data/test --model_dir=model
    python train.py --task_type=infer --infer_data_dir=data/test --model_dir=model
    python train.py --task_type=export --servable_model_dir=servable --model_dir=model

`python train.py --help` lists every flag; deepfm/__main__.py reads them.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("deepfm", run_name="__main__")
