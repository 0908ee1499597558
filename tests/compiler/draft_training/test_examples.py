import torch

from octavo.compiler.draft_training.examples import Example, batches


def examples() -> list[Example]:
    made = []
    for index, (prompt_len, length) in enumerate([(3, 9), (6, 21), (2, 4)]):
        ids = torch.arange(length) + 100 * index
        made.append(Example(ids, ids[:, None].repeat(1, 2).float(), prompt_len))
    return made


def test_windows_hold_each_token_of_each_answer_once() -> None:
    seen: list[int] = []
    for batch in batches(examples(), window=8, size=1, seed=3):
        rows = batch.is_answer
        assert (batch.following[rows] == batch.token_ids[rows] + 1).all()
        assert (batch.features[rows][:, 0] == batch.token_ids[rows]).all()
        real = batch.position_ids > 0
        shown = rows & real
        assert (batch.before[shown][:, 1] == batch.token_ids[shown] - 1).all()
        assert (batch.before[batch.position_ids == 0] == 0).all()
        assert (batch.position_ids[rows] == batch.token_ids[rows] % 100).all()
        seen += batch.following[rows].tolist()
    assert sorted(seen) == [*range(3, 9), *range(106, 121), *range(202, 204)]


def test_order_is_made_by_the_seed_and_batches_are_full() -> None:
    def order(seed: int) -> list[list[int]]:
        return [batch.token_ids[:, 0].tolist() for batch in batches(examples(), 8, 2, seed)]

    assert order(1) == order(1)
    assert any(order(1) != order(seed) for seed in range(2, 9))
    assert all(len(row) == 2 for row in order(1))
    assert [len(batch.token_ids) for batch in batches(examples()[:1], 16, 4, 0)] == [1]
