"""A drafter's files: complete, checked, and never half written."""

from __future__ import annotations

import json
import os
import resource
from contextlib import suppress

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pipeflow_stages.dflash import export
from pipeflow_stages.dflash.export import config_json, load_drafter, read_config, save_drafter
from pipeflow_stages.dflash.model import Drafter


@pytest.fixture
def target(tiny):
    return tiny.target()


@pytest.fixture
def config(tiny, target):
    return tiny.config(target, num_layers=5)


@pytest.fixture
def drafter(tiny, config):
    return tiny.drafter(config)


def test_round_trip_is_exact(tmp_path, drafter, config, target):
    folder = save_drafter(drafter, config, tmp_path / "deep" / "drafter", target.config)
    loaded, loaded_config = load_drafter(folder)
    assert loaded_config == config
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert all(p.requires_grad for p in loaded.parameters())
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in folder.parent.iterdir()] == ["drafter"]


def test_five_layers_are_58_tensors(tmp_path, drafter, config):
    folder = save_drafter(drafter, config, tmp_path / "d", dtype=torch.bfloat16)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert len(file.keys()) == 58
        assert file.metadata() == {"format": "pt"}
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_drafter(folder)[0].fc.weight.dtype == torch.bfloat16


def test_config_has_what_servers_read(config, target):
    target.config.eos_token_id = 7
    document = config_json(config, target.config)
    assert document["architectures"] == ["DFlashDraftModel"]
    assert document["model_type"] == "qwen3"
    assert document["block_size"] == document["dflash_config"]["block_size"] == 4
    assert document["dflash_config"]["mask_token_id"] == 60
    assert document["dflash_config"]["target_layer_ids"] == [1, 3]
    assert document["num_target_layers"] == 6
    assert document["layer_types"] == ["full_attention"] * 5
    assert document["sliding_window"] is None
    assert document["use_sliding_window"] is False
    assert document["rope_scaling"] is None
    assert document["rope_theta"] == document["rope_parameters"]["rope_theta"] == config.rope_theta
    assert document["eos_token_id"] == 7
    assert "auto_map" not in document


def test_transformers_reads_the_config_as_the_same_sizes(tmp_path, drafter, config, target):
    from transformers import Qwen3Config

    folder = save_drafter(drafter, config, tmp_path / "d", target.config)
    read = Qwen3Config.from_pretrained(folder)
    assert (read.hidden_size, read.num_hidden_layers, read.num_attention_heads) == (32, 5, 4)
    assert (read.num_key_value_heads, read.head_dim, read.intermediate_size) == (2, 8, 48)
    assert read.rope_parameters["rope_theta"] == config.rope_theta
    assert read.layer_types == ["full_attention"] * 5


def test_older_and_newer_places_of_the_same_fact_are_read(tmp_path, drafter, config):
    folder = save_drafter(drafter, config, tmp_path / "d")
    document = json.loads((folder / "config.json").read_text())
    for lost in ("block_size", "rope_parameters"):
        (folder / "config.json").write_text(json.dumps({k: v for k, v in document.items() if k != lost}))
        assert read_config(folder) == config


@pytest.mark.parametrize("same_config", [True, False])
@pytest.mark.parametrize("step", ["config", "weights", "flush", "rename"])
def test_an_interrupted_save_leaves_the_old_drafter_whole(
    step, same_config, tmp_path, tiny, drafter, config, target, monkeypatch
):
    folder = save_drafter(drafter, config, tmp_path / "d", target.config)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    new_config = config if same_config else tiny.config(target, num_layers=1)
    new = tiny.drafter(new_config, seed=9)

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if step == "config":
            patch.setattr(export.Path, "write_text", full_disk)
        elif step == "weights":
            patch.setattr(export, "_write_weights", full_disk)
        elif step == "flush":
            patch.setattr(os, "fsync", full_disk)
        else:
            patch.setattr(os, "replace", full_disk)
            real = os.rename
            targets = []

            def rename(source, to):
                """The second rename fails; the way back is open."""
                targets.append(to)
                return full_disk() if len(targets) == 2 else real(source, to)

            patch.setattr(os, "rename", rename)
        with pytest.raises(OSError, match="No space left"):
            save_drafter(new, new_config, folder, target.config)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    # Watch it succeed afterwards.
    save_drafter(new, new_config, folder, target.config)
    assert torch.equal(load_drafter(folder)[0].fc.weight, new.fc.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_wherever_the_disk_fills_a_whole_drafter_stands(
    tmp_path, tiny, drafter, config, target, every_full_disk
):
    folder = save_drafter(drafter, config, tmp_path / "d", target.config)
    before = load_drafter(folder)[0].fc.weight
    new = tiny.drafter(config, seed=9)

    def attempt(after):
        with suppress(OSError):
            save_drafter(new, config, folder, target.config)
        assert [p.name for p in tmp_path.iterdir()] == ["d"]
        weight = load_drafter(folder)[0].fc.weight
        assert torch.equal(weight, before) or torch.equal(weight, new.fc.weight)

    # Three files to flush, one to rename, two folders to flush; safetensors writes out of our sight.
    assert every_full_disk(attempt) == 6
    assert torch.equal(load_drafter(folder)[0].fc.weight, new.fc.weight)


def test_a_real_write_that_fails_is_an_os_error_and_leaves_nothing(tmp_path, drafter, config):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match=r"model\.safetensors|too large"):
            save_drafter(drafter, config, tmp_path / "d")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_files_is_not_replaced(tmp_path, tiny, drafter, config, target):
    folder = save_drafter(drafter, config, tmp_path / "d")
    (folder / "notes.txt").write_text("mine")
    save_drafter(tiny.drafter(config, seed=5), config, folder)  # weights alone change places
    other = tiny.config(target, num_layers=1)
    with pytest.raises(ValueError, match=r"notes\.txt"):
        save_drafter(tiny.drafter(other), other, folder)
    assert (folder / "notes.txt").read_text() == "mine"
    assert load_drafter(folder)[1] == config


def test_weights_that_do_not_fit_are_refused_at_save(tmp_path, tiny, drafter, target):
    with pytest.raises(ValueError, match=r"layers\.1\..*is unknown"):
        save_drafter(drafter, tiny.config(target, num_layers=1), tmp_path / "d")
    assert list(tmp_path.iterdir()) == []
    config = tiny.config(target, vocab_size=99)
    with pytest.raises(ValueError, match="another target"):
        save_drafter(Drafter(config), config, tmp_path / "d", target.config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), r"fc\.weight is missing"),
        (lambda t: t.update(mask_hidden=torch.zeros(1)), "mask_hidden is unknown"),
        (
            lambda t: t.update({"norm.weight": torch.zeros(3)}),
            r"norm\.weight is \[3\], its config says \[32\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_at_load(tmp_path, drafter, config, change, message):
    folder = save_drafter(drafter, config, tmp_path / "d")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "DFlashDraftModel"),
        ({"layer_types": ["sliding_attention"] * 5}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "scaled RoPE"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_attention_heads": None}, "config.json"),
        ({"dflash_config": {"target_layer_ids": [1, 3]}}, "mask_token_id is missing"),
    ],
)
def test_configs_of_other_models_are_refused(tmp_path, drafter, config, change, message):
    folder = save_drafter(drafter, config, tmp_path / "d")
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, **change}))
    with pytest.raises(ValueError, match=message):
        load_drafter(folder)


def test_files_that_are_missing_or_cut_off_are_named(tmp_path, drafter, config):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_drafter(tmp_path)
    folder = save_drafter(drafter, config, tmp_path / "d")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-7])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a complete"):
        load_drafter(folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_drafter(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(folder)
