"""What AdamW remembers is read where it is to stay."""

from pathlib import Path

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from forage.training.optimizer_states import read_states, states_of, write_states


def test_states_are_read_in_place(tmp_path: Path):
    """A second set of them lay beside the first: a run that just fitted a GPU could not go on."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    write_states({"policy": states_of(model, optimizer)}, tmp_path)

    fresh = {"policy": states_of(model, torch.optim.AdamW(model.parameters()))}
    places = [each.data_ptr() for each in tree_leaves(fresh)]
    read_states(fresh, tmp_path)
    assert [each.data_ptr() for each in tree_leaves(fresh)] == places
    expected = tree_leaves({"policy": states_of(model, optimizer)})
    for found, written in zip(tree_leaves(fresh), expected, strict=True):
        assert torch.equal(found, written)
