"""States of a ForgeAdamW: their formats, saved, loaded and replaced."""

from __future__ import annotations

import copy

import pytest
import torch

from adamw_net import LR, assert_same, batch, pair, train
from forge import ForgeAdamW


@pytest.mark.parametrize("states, kept", [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_state_format_is_kept_through_save_and_load(states, kept):
    ours, _ = pair("cpu")
    ours.to(torch.bfloat16)
    optimizer = ForgeAdamW(ours, lr=LR, states=states)
    train(ours, optimizer, batch("cpu"))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.release()
    other = ForgeAdamW(ours, lr=LR, states=states)
    other.load_state_dict(saved)
    for p in ours.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            assert other.state[p][name].dtype == kept
    again = other.state_dict()
    for key, state in saved["state"].items():
        for name, value in state.items():
            assert torch.equal(value, again["state"][key][name])


def test_loads_torch_adamw_and_torch_adamw_loads_it():
    ours, plain = pair("cpu")
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    ids = batch("cpu")
    for _ in range(3):
        train(plain, reference, ids)
    ours.load_state_dict(plain.state_dict())
    optimizer = ForgeAdamW(ours, lr=1.0)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain)
    back = torch.optim.AdamW(plain.parameters(), lr=1.0)
    back.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(ours, optimizer, ids), train(plain, back, ids)
    assert_same(ours, plain, 2)


def test_bad_state_dicts_name_the_parameter_and_change_nothing():
    ours, _ = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    train(ours, optimizer, batch("cpu"))
    good = copy.deepcopy(optimizer.state_dict())

    wrong = copy.deepcopy(good)
    wrong["state"][1]["exp_avg"] = torch.zeros(3)
    wrong["param_groups"][0]["lr"] = 5.0
    with pytest.raises(ValueError, match="'up.weight': exp_avg has shape"):
        optimizer.load_state_dict(wrong)
    missing = copy.deepcopy(good)
    del missing["state"][1]["exp_avg_sq"]
    with pytest.raises(KeyError, match="up.weight.*exp_avg_sq"):
        optimizer.load_state_dict(missing)
    shorter = copy.deepcopy(good)
    shorter["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="param group 0: state_dict has"):
        optimizer.load_state_dict(shorter)
    for step in (-1.0, float("nan"), float("inf"), "x", torch.ones(2)):
        counted = copy.deepcopy(good)
        counted["state"][1]["step"] = step
        with pytest.raises(ValueError, match="'up.weight': 'step' is .*: must be a number from 0"):
            optimizer.load_state_dict(counted)
    nothing = copy.deepcopy(good)
    nothing["state"][1]["exp_avg"] = None
    with pytest.raises(ValueError, match="'up.weight': exp_avg is None: must be a tensor"):
        optimizer.load_state_dict(nothing)
    for other in (torch.complex64, torch.int64, torch.bool):
        typed = copy.deepcopy(good)
        typed["state"][1]["exp_avg"] = typed["state"][1]["exp_avg"].to(other)
        with pytest.raises(ValueError, match=f"'up.weight': exp_avg is {other}: must be floating"):
            optimizer.load_state_dict(typed)
    for useless in ({"optimizer": good}, None, [good]):
        with pytest.raises(KeyError, match="no 'state': pass what optimizer.state_dict"):
            optimizer.load_state_dict(useless)
    empty = {"state": {}, "param_groups": [{"lr": 5.0}]}
    with pytest.raises(KeyError, match="param group 0 of the state_dict has no 'params'"):
        optimizer.load_state_dict(empty)
    for setting in ("lr", "betas"):
        partial = copy.deepcopy(good)
        del partial["param_groups"][0][setting]
        with pytest.raises(KeyError, match=f"param group 0 of the state_dict has no '{setting}'"):
            optimizer.load_state_dict(partial)
    with pytest.raises(ValueError, match="'state' must be a dict"):
        optimizer.load_state_dict({**good, "state": [{}]})
    assert optimizer.param_groups[0]["lr"] == LR
    for key, state in good["state"].items():
        for name, value in state.items():
            assert torch.equal(value, optimizer.state_dict()["state"][key][name])


def test_replaced_states_are_used():
    ours, plain = pair("cpu")
    optimizer = ForgeAdamW(ours, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    ids = batch("cpu")
    train(ours, optimizer, ids), train(plain, reference, ids)
    for net, opt in ((ours, optimizer), (plain, reference)):
        weight = net.up.weight
        opt.state[weight]["exp_avg"] = torch.full_like(weight, 0.01)
        opt.state[weight]["exp_avg_sq"] = torch.full_like(weight, 0.01)
    train(ours, optimizer, ids), train(plain, reference, ids)
    assert_same(ours, plain, 2)
    optimizer.state.clear(), reference.state.clear()
    train(ours, optimizer, ids), train(plain, reference, ids)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        # A first step again: it takes a gradient's sign, also of one that is round-off.
        assert ((p - q).abs() > 1e-2 * LR).float().mean() < 0.01
    assert len(optimizer.state_dict()["state"]) == len(list(ours.parameters()))
