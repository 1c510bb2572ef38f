"""Raw records from files to batches: read, packed, shuffled, cut.

Records travel in chunks: string [n], or, if `packed`, string [2]: the bytes of all records, one
after another, and the end of each (csrc/packed.h).
"""

from deepfm.kernels.build import raw_ops
from deepfm.runtime.tf import random_seed, tf

CHUNK = 256  # records that threads pass on at once; one by one would cost more than reading them


class Plain:
    """With TensorFlow's operators."""

    @property
    def chunk_shape(self):
        """The shape of a chunk."""
        return [2 if self.packed else None]

    def pack(self, strings):
        """Turns a dataset of string [n] into one of chunks."""
        return strings

    def no_records(self):
        """A chunk without records."""
        return tf.zeros([2 if self.packed else 0], tf.string)

    def num_records(self, chunk):
        """int32 []: the number of records in a chunk."""
        return tf.size(chunk)

    def rechunked(self, chunks, size, shuffle_buffer=0, seed=1, skip=0, take=-1):
        """As .unbatch().shuffle(shuffle_buffer, seed).skip(skip).take(take).batch(size), in order.

        Args:
            chunks: a dataset of chunks.
            size: records in each resulting chunk but the last.
            shuffle_buffer: records from which the next one is drawn; 0 or 1 keeps the order.
            seed: int64 [] or int, seed of the shuffling.
            skip, take: int64 [] or int, numbers of records; a negative `take` takes all.
        """
        records = chunks.unbatch()
        if shuffle_buffer > 1:
            records = records.shuffle(shuffle_buffer, seed, reshuffle_each_iteration=False)
        return records.skip(skip).take(take).batch(size)

    def read(self, path, buffer_bytes, file_bytes, plain):
        """The chunks of an uncompressed TFRecord file.

        Fails with DataLossError if the file is damaged, or if it is not `file_bytes`, int64 [],
        long (below 0: any).

        Args:
            plain: () -> a dataset of string [n].
        """
        return plain()


class Compiled:
    """As Plain, with the compiled operators."""

    def pack(self, strings):
        return strings.map(pack)

    def num_records(self, chunk):
        return tf.strings.length(chunk[1]) // 8

    def rechunked(self, chunks, size, shuffle_buffer=0, seed=1, skip=0, take=-1):
        seed, seed2 = random_seed.get_seed(seed) if shuffle_buffer > 1 else (1, 1)
        numbers = _int64s(size, shuffle_buffer, seed, seed2, skip, take)
        return _dataset(raw_ops().deepfm_chunks(tf.data.experimental.to_variant(chunks), *numbers))

    def read(self, path, buffer_bytes, file_bytes, plain):
        chunks = records_of(path, buffer_bytes, CHUNK, file_bytes)
        # The empty chunk makes a file take as many turns as with TensorFlow's own.
        return chunks.concatenate(tf.data.Dataset.from_tensors(self.no_records()))


def pack(strings):
    """Packs records: string [...] -> string [2]."""
    return raw_ops().deepfm_pack(strings)


def records_of(path, buffer_bytes, size, file_bytes=-1):
    """The records of an uncompressed TFRecord file, in packed chunks of `size`.

    Fails with DataLossError if the file is damaged, if it ends inside a length, which
    tf.data.TFRecordDataset takes for its end, or if it is not `file_bytes` long (below 0: any).
    """
    numbers = _int64s(buffer_bytes, size, file_bytes)
    return _dataset(raw_ops().deepfm_records(path, *numbers))


def _int64s(*numbers):
    """Each number as int64 []. Not by a cast: grappler would fold it into a constant, merge that
    with equal ones, such as the -1 of a repeat(), and crash (tf.data's noop_elimination)."""
    return [tf.convert_to_tensor(number, tf.int64) for number in numbers]


def _dataset(variant):
    return tf.data.experimental.from_variant(variant, tf.TensorSpec([2], tf.string))
