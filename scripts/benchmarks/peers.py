"""What a careful user would take instead of train.py and of prepare; benchmark.py compares with it.
Prints JSON.

    python peers.py torch_training --data=train.npz --feature_size=117581 --steps=300
    python peers.py torch --data=test.npz --feature_size=117581 --output=p.txt
    python peers.py onnxruntime --servable=servable/1700000000 --data=test.npz --output=p.txt
    python peers.py tensorflow --servable=servable/1700000000 --data=test.npz --output=p.txt
    python peers.py pandas --data=clicks.csv --output=clicks.npz
    python peers.py polars --data=clicks.csv --output=clicks.npz

PyTorch (torch_reference.py) is the fastest of its implementations; training has its data in memory,
so reading costs it nothing.
Inference goes from arrays in a file, int64 ids and float32 values [N, F], to a probability a line,
but for PyTorch with the weights of an export of ours. TensorFlow 2.x runs its serving_default. No
converter to ONNX takes its sparse products, so the ONNX model is the plain graph of a DeepFM. The
tables become integers from 0 to the number of categories, and floats; categories of fewer than 10
rows become one.
Packages: those of requirements-peers.txt.
"""

import argparse
import json
import os
import time

import numpy as np

MIN_COUNT = 10


def onnxruntime(given):
    """A function of ids and values, which gives probabilities."""
    import onnx
    import onnxruntime
    import tensorflow as tf

    kept = tf.train.load_checkpoint(os.path.join(given.servable, "variables", "variables"))
    weights = {name: kept.get_tensor(name) for name in kept.get_variable_to_shape_map()}
    layers = sum(name.endswith("/kernel") for name in weights) - 1
    nodes, constants = [], {name: x for name, x in weights.items() if name != "global_step"}
    constants.update(one=np.array([1]), half=np.float32(0.5))

    def node(kind, *inputs, **attributes):
        nodes.append(onnx.helper.make_node(kind, inputs, [f"x{len(nodes)}"], **attributes))
        return nodes[-1].output[0]

    total = lambda x: node("ReduceSum", x, "one", keepdims=0)
    constants["last"] = np.array([2])
    scale = node("Unsqueeze", "values", "last")
    e = node("Mul", node("Gather", "fm_v", "ids"), scale)
    first = total(node("Mul", node("Gather", "fm_w", "ids"), "values"))
    summed, squared = total(e), total(node("Mul", e, e))
    second = node("Sub", node("Mul", summed, summed), squared)
    second = node("Mul", total(second), "half")
    hidden = node("Flatten", e)
    for i in range(layers):
        hidden = node("Relu", node("Gemm", hidden, f"deep_{i}/kernel", f"deep_{i}/bias"))
    constants["flat"] = np.array([-1])
    deep = node("Reshape", node("Gemm", hidden, "deep_out/kernel", "deep_out/bias"), "flat")
    logit = node("Sum", first, second, deep, "fm_bias")
    nodes.append(onnx.helper.make_node("Sigmoid", [logit], ["prob"]))
    tensor = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes, "deepfm",
        [tensor("ids", onnx.TensorProto.INT64, [None, None]),
         tensor("values", onnx.TensorProto.FLOAT, [None, None])],
        [tensor("prob", onnx.TensorProto.FLOAT, [None])],
        [onnx.numpy_helper.from_array(x, name) for name, x in constants.items()],
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 15)])
    model.ir_version = 8
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return lambda ids, values: session.run(None, {"ids": ids, "values": values})[0]


def tensorflow(given):
    """The same."""
    import tensorflow as tf

    served = tf.saved_model.load(given.servable).signatures["serving_default"]
    return lambda x, y: served(feat_ids=tf.constant(x), feat_vals=tf.constant(y))["prob"].numpy()


def infer(given, arrays, predict):
    """The figures from the file of records to that of predictions, after a batch to warm up."""
    predict(*(x[: given.batch_size] for x in arrays))
    began, cpu = time.monotonic(), time.process_time()
    ids, values = read(given)
    with open(given.output, "w") as out:
        for i in range(0, len(ids), given.batch_size):
            part = slice(i, i + given.batch_size)
            prob = predict(ids[part], values[part]).tolist()
            out.write("%.9g\n" * len(prob) % tuple(prob))
    return figures(len(ids), began, cpu)


def read(given, *more):
    """Arrays of the file of records: ids, values and, if asked for, labels."""
    arrays = np.load(given.data)
    return [arrays[name] for name in ("ids", "values", *more)]


def train(given, arrays, step):
    """The figures of --steps steps on the batches of some examples, after a tenth to warm up."""
    size, warm = given.batch_size, max(10, given.steps // 10)
    batches = len(arrays[0]) // size
    for i in range(warm + given.steps):
        if i == warm:
            began, cpu = time.monotonic(), time.process_time()
        step(slice(i % batches * size, (i % batches + 1) * size))
    return figures(given.steps * size, began, cpu)


def fastest(given):
    """The figures of the implementation on PyTorch that is the fastest."""
    import torch_reference

    run, makers, arrays = infer, torch_reference.INFERENCES, read(given)
    if given.what == "torch_training":
        run, makers, arrays = train, torch_reference.TRAININGS, read(given, "labels")
    found = {name: run(given, arrays, make(given, arrays)) for name, make in makers.items()}
    rates = {name: of_one["examples_per_second"] for name, of_one in found.items()}
    best = max(rates, key=rates.get)
    return {**found[best], "implementation": best, "rates": rates}


def figures(examples, began, cpu):
    """The figures of what began at these times of the clock and of this process's CPU."""
    seconds = time.monotonic() - began
    share = (time.process_time() - cpu) / seconds / len(os.sched_getaffinity(0))
    return {"examples_per_second": examples / seconds, "cpu_utilization": share}


def pandas(given):
    """Encodes a table: all columns but the first, clicked, are numbers or categories."""
    import pandas
    from sklearn.preprocessing import OrdinalEncoder

    table = pandas.read_csv(given.data, engine="pyarrow")
    label, rest = table.iloc[:, 0], table.iloc[:, 1:]
    numbers = rest.select_dtypes("number")
    categories = rest.drop(columns=numbers.columns).astype(object)
    encoder = OrdinalEncoder(
        min_frequency=MIN_COUNT, handle_unknown="use_encoded_value", unknown_value=-1,
        encoded_missing_value=-1,
    )  # fmt: skip
    ids = encoder.fit_transform(categories).astype(np.int32)
    np.savez(given.output, labels=label, numbers=numbers, ids=ids)
    return len(table)


def polars(given):
    """The same."""
    import polars

    table = polars.read_csv(given.data)
    columns = table.columns[1:]
    categories = [name for name in columns if table[name].dtype == polars.String]
    for name in categories:
        counts = table[name].value_counts().filter(polars.col("count") >= MIN_COUNT)
        often = counts.drop_nulls().sort("count", name, descending=[True, False])[name]
        ids = polars.Series(range(len(often)), dtype=polars.Int32)
        code = table[name].replace_strict(often, ids, default=-1, return_dtype=polars.Int32)
        table = table.with_columns(code.alias(name))
    numbers = [name for name in columns if name not in categories]
    np.savez(
        given.output, labels=table[:, 0].to_numpy(), ids=table[categories].to_numpy(),
        numbers=table[numbers].to_numpy(),
    )  # fmt: skip
    return len(table)


def main():
    parser = argparse.ArgumentParser()
    kinds = {"onnxruntime": onnxruntime, "tensorflow": tensorflow}
    tables = {"pandas": pandas, "polars": polars}
    parser.add_argument("what", choices=["torch_training", "torch", *kinds, *tables])
    parser.add_argument(
        "--data", required=True, help="npz of ids, values and labels, or a CSV with header"
    )
    parser.add_argument("--output", help="file to write; training writes none")
    parser.add_argument("--servable", help="folder of an export, for inference")
    parser.add_argument("--feature_size", type=int, help="number of feature ids, for PyTorch")
    parser.add_argument("--steps", type=int, default=300, help="steps that are counted")
    parser.add_argument("--batch_size", type=int, default=1024, help="records in a batch")
    given = parser.parse_args()
    if given.what in tables:
        began, cpu = time.monotonic(), time.process_time()
        found = figures(tables[given.what](given), began, cpu)
    elif given.what in kinds:
        found = infer(given, read(given), kinds[given.what](given))
    else:
        found = fastest(given)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
