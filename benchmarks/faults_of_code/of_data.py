"""Faults of data and the tools that make it."""

from faults_of_code.mutation import Mutation

MUTATIONS = (
    Mutation(
        "the shuffle walks one step too few",
        "lmlib/data/permutation.py",
        "while (outside := walked >= np.uint64(size)).any():",
        "if (outside := walked >= np.uint64(size)).any():",
        "tests/data/test_permutation.py",
    ),
    Mutation(
        "every epoch has the order of the first",
        "lmlib/data/permutation.py",
        "round_keys = hash_words(seed, epoch, np.arange(ROUNDS, dtype=np.uint64))",
        "round_keys = hash_words(seed, 0, np.arange(ROUNDS, dtype=np.uint64))",
        "tests/data/test_permutation.py tests/data/test_order.py",
    ),
    Mutation(
        "the first token of a document is a target",
        "lmlib/data/packing.py",
        "loss_mask=in_loss_BS & ~starts_BT[:, 1:]",
        "loss_mask=in_loss_BS",
        "tests/data/test_packing.py",
    ),
    Mutation(
        "sequences leave a token out between them",
        "lmlib/data/flat_tokens.py",
        "start_B = sequence_B * self.sequence_length",
        "start_B = sequence_B * (self.sequence_length + 1)",
        "tests/data/test_flat_tokens.py",
    ),
    Mutation(
        "a damaged chunk of tokens is trained on",
        "lmlib/data/stored/token_arrays.py",
        "wrong = np.flatnonzero(found != self._chunk_digests[chunk : chunk + len(found)])",
        "wrong = np.flatnonzero(found != found)",
        "tests/data/test_swapped_data.py",
    ),
    Mutation(
        "places of a mixture go to the shares that lost least",
        "lmlib/data/mixture.py",
        "key=lambda each: counts[each] - quotas[each]",
        "key=lambda each: quotas[each] - counts[each]",
        "tests/data/test_mixture.py",
    ),
    Mutation(
        "a mixture leaves out the first sequence of each source",
        "lmlib/data/mixture.py",
        "np.cumsum(is_source_PN, axis=0) - is_source_PN",
        "np.cumsum(is_source_PN, axis=0)",
        "tests/data/test_mixture.py",
    ),
    Mutation(
        "the first token of each document is counted as a target",
        "lmlib/data/stored/shard_writer.py",
        "is_target[firsts] = False",
        "is_target[firsts] = True",
        "tests/data/test_shard_writer.py",
    ),
    Mutation(
        "texts that are held out are trained on",
        "data_tools/held_out.py",
        "return is_held_out == self.held_out",
        "return is_held_out or not self.held_out",
        "tests/data_tools/test_held_out.py",
    ),
    Mutation(
        "a killed preparation leaves out a block",
        "data_tools/pretokenize/writing.py",
        "            writer.mark(block.position)\n            _write(writer, encoded)\n",
        "            _write(writer, encoded)\n            writer.mark(block.position)\n",
        "tests/data_tools/test_pretokenize_faults.py tests/data_tools/test_pretokenize.py",
    ),
    Mutation(
        "max_tokens ends a document too early",
        "data_tools/pretokenize/writing.py",
        "return encoded.first(int(ends.searchsorted(tokens)) + 1), True",
        "return encoded.first(int(ends.searchsorted(tokens))), True",
        "tests/data_tools/test_pretokenize.py",
    ),
    Mutation(
        "texts are encoded without their normalisation",
        "data_tools/encoders/byte_level.py",
        "if self._to_nfc and may_change(chunk):",
        "if self._to_nfc and not may_change(chunk):",
        "tests/data_tools/test_encoders.py",
    ),
    Mutation(
        "answers that both of a pair have are still learnt",
        "data_tools/prepare_chats/answers.py",
        "tuple(turn for turn in each.assistant if turn not in shared)",
        "tuple(each.assistant)",
        "tests/data_tools/test_prepare_chats.py",
    ),
)
