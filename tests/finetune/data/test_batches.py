import json
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from chat_outputs import BYTEWISE, said
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.finetune.data.batches import Batches
from kimi_jax.finetune.data.documents import Documents
from kimi_jax.finetune.data.errors import DataError
from kimi_jax.finetune.data.packing import Packer, Piece

END = 257  # [EOS] behind the 256 bytes
A, B, C, D, E, F, G, H, L, o, Q, X, Y, Z = b"abcdefghloqxyz"


def documents_of(directory, texts, **options):
    path = Path(directory) / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Documents([path], BYTEWISE, **options)


@pytest.fixture
def documents(tmp_path):
    """30 texts of 1 to 59 characters, no two alike."""
    return documents_of(tmp_path, [chr(65 + number) * (number * 7 % 60 or 1) for number in range(30)])


def pieces_of(batch):
    """The tokens, targets and weights of each document in the rows."""
    found = []
    for tokens, targets, weights, first, length in zip(*batch, strict=True):
        for start in np.unique(first[:length]):
            places = np.flatnonzero(first[:length] == start)
            assert places.tolist() == list(range(start, start + len(places)))
            found.append((tuple(tokens[places]), tuple(targets[places]), tuple(weights[places])))
        assert first[length:].tolist() == [length] * (len(first) - length)
        for array in (tokens, targets, weights):
            assert not array[length:].any()
    return found


def same(left, right):
    return all(np.array_equal(one, other) for one, other in zip(left, right, strict=True))


def test_documents_packed_by_hand(tmp_path):
    texts = ["abcd", "xyz", "q", "hello"]  # 4, 3, 1 and 5 places
    batches = Batches(documents_of(tmp_path, texts), rows=2, length=5, shuffle=False, epochs=1)
    one, two = batches
    assert one.tokens.tolist() == [[A, B, C, D, Q], [H, E, L, L, o]]
    assert one.targets.tolist() == [[B, C, D, END, END], [E, L, L, o, END]]
    assert one.weights.tolist() == [[1] * 5] * 2
    assert one.first.tolist() == [[0, 0, 0, 0, 4], [0] * 5]
    assert one.lengths.tolist() == [5, 5]
    assert two.tokens.tolist() == [[X, Y, Z, 0, 0], [0] * 5]
    assert two.targets.tolist() == [[Y, Z, END, 0, 0], [0] * 5]
    assert two.weights.tolist() == [[1, 1, 1, 0, 0], [0] * 5]
    assert two.first.tolist() == [[0, 0, 0, 3, 3], [0] * 5]
    assert two.lengths.tolist() == [3, 0]
    assert [array.dtype for array in one] == ["int32", "int32", "float32", "int32", "int32"]
    assert list(batches) == []


def test_without_packing_each_document_has_a_row(tmp_path):
    texts = ["a", "bcd", "ef"]
    one, two = Batches(documents_of(tmp_path, texts), rows=2, length=4, packing=False, shuffle=False, epochs=1)
    assert one.tokens.tolist() == [[A, 0, 0, 0], [B, C, D, 0]]
    assert one.first.tolist() == [[0, 1, 1, 1], [0, 0, 0, 3]]
    assert (two.tokens.tolist(), two.lengths.tolist()) == ([[E, F, 0, 0], [0] * 4], [2, 0])


@pytest.mark.parametrize("packing", [True, False])
def test_a_document_longer_than_a_row_is_cut_and_no_target_lost(tmp_path, packing):
    documents = documents_of(tmp_path, ["abcdefgh", "xy"])  # 8 and 2 places
    [batch] = Batches(documents, rows=4, length=3, packing=packing, shuffle=False, epochs=1)
    tokens = [[A, B, C], [D, E, F], [G, H, 0], [X, Y, 0]]
    targets = [[B, C, D], [E, F, G], [H, END, 0], [Y, END, 0]]
    assert batch.tokens.tolist() == tokens
    assert batch.targets.tolist() == targets
    assert batch.lengths.tolist() == [3, 3, 2, 2]


def test_weights_stand_at_the_place_where_the_token_is_predicted(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, said("t", "b")], "thinking": False}))
    [batch] = Batches(Documents([path], BYTEWISE), rows=1, length=1000, epochs=1)
    [row], [weights], [length] = batch.targets, batch.weights, batch.lengths
    learned = BYTEWISE.decode(row[weights == 1])
    assert learned == "b<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    [start] = np.flatnonzero(np.diff(weights[:length])).tolist()
    assert BYTEWISE.decode(batch.tokens[0, : start + 2]).endswith("<|open|>response<|sep|>")


def piece(name, places):
    zeros = np.zeros(places, np.int32)
    return Piece(name, 0, zeros, zeros, np.zeros(places, np.float32))


def test_first_fit_over_the_open_rows():
    packer = Packer(10, window=2)
    finished = [
        [piece.line for piece in packer.add(piece(name, places)) or ()]
        for name, places in enumerate([6, 7, 3, 4, 8, 9, 10, 2])
    ]
    # 0 and 1 open rows, 2 goes to 0's, and 3 to neither; the fullest of three, 0's with 9, leaves. 4 opens a row and
    # is the fullest, 5 likewise. 6 fills a row. 7 has room behind 1.
    assert finished == [[], [], [], [0, 2], [4], [5], [6], []]
    assert [[piece.line for piece in row] for row in packer.rows] == [[1, 7], [3]]
    assert [piece.line for piece in packer.take()] == [1, 7]
    assert packer.add(piece(8, 6))[1].line == 8
    assert packer.take() is None


def test_each_epoch_has_an_order_of_its_own_that_the_seed_decides(documents):
    def epochs(**options):
        batches = Batches(documents, rows=1, length=60, packing=False, epochs=2, **options)
        letters = [int(batch.tokens[0, 0]) - 65 for batch in batches]
        return letters[:30], letters[30:]

    one, two = epochs(seed=3)
    assert sorted(one) == sorted(two) == list(range(30))
    assert len({tuple(order) for order in (one, two, *epochs(seed=4), range(30))}) == 5
    assert epochs(seed=3) == (one, two)
    assert epochs(seed=3, shuffle=False) == (list(range(30)), list(range(30)))


@pytest.mark.parametrize("processes", [2, 3, 6])
def test_processes_share_the_rows_of_the_same_batches(documents, processes):
    options = {"rows": 6, "length": 40, "seed": 1, "epochs": 3}
    shares = [
        list(Batches(documents, **options, process_index=index, process_count=processes)) for index in range(processes)
    ]
    for whole, *parts in zip(Batches(documents, **options), *shares, strict=True):
        assert {part.tokens.shape for part in parts} == {(6 // processes, 40)}
        assert same(whole, [np.concatenate(arrays) for arrays in zip(*parts, strict=True)])


@pytest.mark.parametrize("options", [{"length": 40}, {"length": 16}, {"length": 25, "packing": False}])
def test_a_run_goes_on_from_every_position(documents, options):
    options = options | {"seed": 5, "epochs": 2, "rows": 2}
    batches = Batches(documents, **options)
    states, whole = [batches.state()], []
    for batch in batches:
        whole.append(batch)
        states.append(json.loads(json.dumps(batches.state())))
    assert len(whole) > 20
    for step, state in enumerate(states):
        # The second process of two, which knows nothing of the first.
        again = Batches(documents, **options, process_index=1, process_count=2)
        again.restore(state)
        rest = list(again)
        assert len(rest) == len(whole) - step
        assert all(same([array[1:] for array in old], new) for old, new in zip(whole[step:], rest, strict=True))


def test_a_run_goes_on_with_other_batches_of_the_same_rows(documents):
    two, three = (Batches(documents, rows=rows, length=40, seed=5, epochs=2) for rows in (2, 3))
    for _ in range(4):
        next(two)
    three.restore(two.state())
    rest = [np.concatenate([batch.tokens[batch.lengths > 0] for batch in batches]) for batches in (two, three)]
    assert np.array_equal(*rest)


def test_a_used_iterator_goes_back_and_epochs_are_counted(tmp_path):
    batches = Batches(documents_of(tmp_path, ["abcd", "efg", "hhhhh"]), rows=1, length=4, seed=2, packing=False)
    start = batches.state()
    ahead = list(islice(batches, 8))  # two epochs of four pieces
    assert batches.epochs_done == 2
    batches.restore(start)
    assert batches.epochs_done == 0
    assert same(ahead[0], next(batches))
    done = {batches.epochs_done}
    for batch in ahead[1:4]:
        assert same(batch, next(batches))
        done.add(batches.epochs_done)
    assert done - {0} == {1 / 3, 2 / 3, 1}


def test_lines_left_out_do_not_move_the_position(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join("{}\n" if i % 3 else json.dumps({"text": "x" * (i + 1)}) + "\n" for i in range(40)))
    told = []

    def batches():
        return Batches(Documents([path], BYTEWISE, report=told.append), rows=1, length=50, seed=1, epochs=2)

    run = batches()
    first = list(islice(run, 5))
    again = batches()
    again.restore(run.state())
    rest = list(run)
    assert all(same(*pair) for pair in zip(rest, again, strict=True))
    assert sum(int(batch.lengths.sum()) for batch in first + rest) == 2 * sum(i + 1 for i in range(0, 40, 3))
    assert 26 <= len(told) <= 2 * 26


def test_a_position_in_other_data_or_under_other_settings_is_refused(tmp_path, documents):
    state = Batches(documents, rows=2, length=40, seed=1).state()
    for options, found in (
        ({"length": 41}, "length 40, but here it is 41"),
        ({"length": 40, "seed": 2}, "seed 1, but here it is 2"),
        ({"length": 40, "packing": False}, "packing True, but here it is False"),
        ({"length": 40, "shuffle": False}, "shuffle True, but here it is False"),
    ):
        with pytest.raises(DataError, match=f"the saved position is one of {found}"):
            Batches(documents, rows=2, **({"seed": 1} | options)).restore(state)
    (tmp_path / "other").mkdir()
    other = documents_of(tmp_path / "other", ["another"])
    with pytest.raises(DataError, match=r"the saved position is one of data '.*': go on with the same data"):
        Batches(other, rows=2, length=40, seed=1).restore(state)
    everything = Documents(documents.lines.paths, BYTEWISE, train_on="all")
    with pytest.raises(DataError, match="one of train_on 'assistant', but here it is 'all'"):
        Batches(everything, rows=2, length=40, seed=1).restore(state)


def test_an_open_row_of_a_document_that_has_changed_is_refused(tmp_path):
    batches = Batches(documents_of(tmp_path, ["abcd", "x" * 9]), rows=1, length=9, shuffle=False)
    next(batches)
    state = batches.state()
    assert state["rows"] == [[[0, 0, 4]]]
    changed = documents_of(tmp_path, ["abc", "x" * 9])
    state["settings"]["data"] = changed.lines.digest
    with pytest.raises(DataError, match=r"texts\.jsonl: line 1: not the document of the saved position"):
        Batches(changed, rows=1, length=9, shuffle=False).restore(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows: found 0, wanted at least 1"),
        ({"length": 0}, "length: found 0, wanted at least 1"),
        ({"seed": -1}, "seed: found -1, wanted at least 0"),
        ({"epochs": 0}, "epochs: found 0, wanted at least 1"),
        ({"process_index": 2, "process_count": 2}, "process_index: found 2, wanted 0 to 1"),
        ({"rows": 3, "process_count": 2}, "rows: found 3, wanted a multiple of the 2 processes"),
    ],
)
def test_wrong_numbers_are_refused(documents, options, message):
    with pytest.raises(ValueError, match=message):
        Batches(documents, **({"rows": 4, "length": 8} | options))


TEXTS = st.lists(st.text("abé", min_size=1, max_size=25), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(
    texts=TEXTS,
    rows=st.integers(1, 4),
    length=st.integers(1, 30),
    packing=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(0, 9),
    epochs=st.integers(1, 3),
)
def test_all_of_every_document_comes_once_an_epoch(texts, rows, length, packing, shuffle, seed, epochs):
    with tempfile.TemporaryDirectory() as directory:
        documents = documents_of(directory, texts)
        batches = Batches(
            documents, rows=rows, length=length, packing=packing, shuffle=shuffle, seed=seed, epochs=epochs
        )
        found = Counter(piece for batch in batches for piece in pieces_of(batch))
    expected = Counter()
    for text in texts:
        ids = [*text.encode(), END]
        for start in range(0, len(ids) - 1, length):
            stop = min(start + length, len(ids) - 1)
            expected[tuple(ids[start:stop]), tuple(ids[start + 1 : stop + 1]), (1.0,) * (stop - start)] += epochs
    assert found == expected
