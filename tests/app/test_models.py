"""Models: their sizes and names, what they compute, that they learn, and what they refuse."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compressed_ddp.models import GPT, MODELS, ResNet, build, count_parameters, outline, table

IMAGES = [name for name, info in MODELS.items() if info.kind == "image"]
IMAGENET = (3, 224, 224)


def small(name: str, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """A model with ``seed``, and four small random examples with their targets."""
    torch.manual_seed(seed)
    if MODELS[name].kind == "text":
        tokens = torch.randint(256, (4, 17))
        return build(name, shape=(16,), classes=256), tokens[:, :-1], tokens[:, 1:]
    model = build(name, shape=(3, 8, 8), classes=10)
    return model, torch.randn(4, 3, 8, 8), torch.arange(4)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "size"),
    [
        ("resnet18", IMAGENET, 1000, 11_689_512),  # published, as the next one
        ("resnet50", IMAGENET, 1000, 25_557_032),
        ("simple_cnn", (1, 28, 28), 10, 206_922),
        ("gpt", (128,), 256, 842_496),
    ],
)
def test_sizes(name: str, shape: tuple[int, ...], classes: int, size: int) -> None:
    assert count_parameters(outline(name, shape=shape, classes=classes)) == size


def test_count_leaves_frozen_parameters_out() -> None:
    model = nn.Linear(3, 2)
    assert count_parameters(model) == 8
    model.bias.requires_grad_(False)
    assert count_parameters(model) == 6


@pytest.mark.parametrize(("name", "entries", "last"), [("resnet18", 122, 2), ("resnet50", 320, 3)])
def test_resnets_have_torchvision_names(name: str, entries: int, last: int) -> None:
    state = outline(name, shape=IMAGENET, classes=1000).state_dict()
    assert len(state) == entries
    norm = "(weight|bias|running_mean|running_var|num_batches_tracked)"
    block = rf"conv[1-{last}]\.weight|bn[1-{last}]\.{norm}|downsample\.(0\.weight|1\.{norm})"
    known = re.compile(rf"conv1\.weight|bn1\.{norm}|layer[1-4]\.\d\.({block})|fc\.(weight|bias)")
    assert [key for key in state if not known.fullmatch(key)] == []
    assert state["conv1.weight"].shape == (64, 3, 7, 7)
    assert state["layer2.0.downsample.0.weight"].shape[2:] == (1, 1)
    # A shortcut needs a convolution in the first block only, and in layer 1 only where it widens.
    assert "layer2.1.downsample.0.weight" not in state
    assert ("layer1.0.downsample.0.weight" in state) == (name == "resnet50")


def test_bottleneck_has_its_stride_on_the_3x3() -> None:
    block = outline("resnet50", shape=IMAGENET, classes=10).get_submodule("layer2.0")
    assert [block.get_submodule(f"conv{i}").stride for i in (1, 2, 3)] == [(1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize(("height", "stem", "pixels"), [(32, 3, 4), (63, 3, 8), (64, 7, 2)])
def test_stem_follows_the_height(height: int, stem: int, pixels: int) -> None:
    model = build("resnet18", shape=(3, height, height), classes=10).eval()
    assert isinstance(model, ResNet)
    shapes: list[torch.Size] = []
    model.layer4.register_forward_hook(lambda _module, _args, output: shapes.append(output.shape))
    with torch.no_grad():
        model(torch.randn(1, 3, height, height))
    assert model.conv1.kernel_size == (stem, stem)
    assert shapes == [(1, 512, pixels, pixels)]


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 30, 45)])
@pytest.mark.parametrize("name", IMAGES)
def test_image_logits(name: str, shape: tuple[int, ...]) -> None:
    logits = build(name, shape=shape, classes=7)(torch.randn(2, *shape))
    assert logits.shape == (2, 7) and logits.isfinite().all()


@pytest.mark.parametrize("name", IMAGES)
def test_large_images(name: str) -> None:
    with torch.no_grad():
        logits = build(name, shape=IMAGENET, classes=11).eval()(torch.randn(1, *IMAGENET))
    assert logits.shape == (1, 11) and logits.isfinite().all()


def test_simple_cnn_stays_small_on_large_images() -> None:
    large, cifar = (outline("simple_cnn", shape=shape, classes=10) for shape in (IMAGENET, (3, 32, 32)))
    assert count_parameters(large) == count_parameters(cifar)


def test_simple_cnn_is_a_function_of_weights_and_batch() -> None:
    """No dropout, no batch norm: training and evaluation give the same, and nothing is remembered."""
    model, images, _ = small("simple_cnn")
    assert list(model.buffers()) == []
    assert torch.equal(model.train()(images), model.eval()(images))


@pytest.mark.parametrize("length", [1, 5, 16])
def test_text_logits(length: int) -> None:
    logits = build("gpt", shape=(16,), classes=256)(torch.randint(256, (3, length)))
    assert logits.shape == (3, length, 256) and logits.isfinite().all()


@pytest.mark.parametrize("at", [1, 7, 15])
def test_gpt_sees_no_later_byte(at: int) -> None:
    model, tokens, _ = small("gpt")
    changed = tokens.clone()
    changed[:, at] = (changed[:, at] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :at], after[:, :at])
    # All that follow do see it.
    assert (before[:, at:] != after[:, at:]).any(2).all()


def test_gpt_knows_positions() -> None:
    model, _, _ = small("gpt")
    same = model(torch.full((1, 8), 65))
    assert not torch.allclose(same[:, 0], same[:, 5])


def test_gpt_input_and_output_share_one_parameter() -> None:
    model, tokens, _ = small("gpt")
    assert isinstance(model, GPT)
    of_vocabulary = [name for name, p in model.named_parameters() if 256 in p.shape and 128 in p.shape]
    assert of_vocabulary == ["tokens.weight"]
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    # A byte that is not in the input still gets its logit from its row of the embedding.
    absent = next(byte for byte in range(256) if not (tokens == byte).any())
    before = model(tokens)
    with torch.no_grad():
        model.tokens.weight[absent] *= -2
    after = model(tokens)
    torch.testing.assert_close(after[..., absent], -2 * before[..., absent])
    others = torch.arange(256) != absent
    assert torch.equal(after[..., others], before[..., others])


def test_gpt_starts_as_gpt2_does() -> None:
    torch.manual_seed(0)
    model = GPT(128, layers=8)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight"):
            assert parameter.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05), name
        elif parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
        else:
            assert torch.equal(
                parameter, torch.full_like(parameter, float("norm" in name and "weight" in name))
            )
    loss = loss_of(model, torch.randint(256, (4, 128)), torch.randint(256, (4, 128)))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)  # it favours no byte


def test_gpt_dropout_is_for_training_alone() -> None:
    tokens = torch.randint(256, (2, 8))
    model = GPT(8, dropout=0.5)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    default = GPT(8)
    assert torch.equal(default(tokens), default(tokens))


@pytest.mark.parametrize("name", MODELS)
def test_same_seed_same_weights(name: str) -> None:
    first, same, other = (dict(small(name, seed)[0].named_parameters()) for seed in (0, 0, 1))
    for key, parameter in first.items():
        assert torch.equal(parameter, same[key]), key
        if parameter.dim() > 1:  # not a norm or a bias: drawn at random
            assert not torch.equal(parameter, other[key]), key


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_every_parameter(name: str) -> None:
    model, inputs, targets = small(name)
    loss_of(model, inputs, targets).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), f"{key} has a gradient of zeros"


@pytest.mark.parametrize(
    ("name", "rate", "steps"),
    [("simple_cnn", 0.1, 20), ("resnet18", 0.005, 4), ("resnet50", 0.003, 6), ("gpt", 0.1, 25)],
)
def test_learns_four_examples_by_heart(name: str, rate: float, steps: int) -> None:
    model, inputs, targets = small(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.4 * losses[0], losses


def test_table_lists_every_model_with_its_size() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    header, *lines = table().splitlines()
    assert torch.equal(torch.get_rng_state(), state)
    assert header.split() == ["model", "parameters", "on", "kind", "about"]
    for (name, info), line in zip(MODELS.items(), lines, strict=True):
        size = sum(p.numel() for p in outline(name, shape=info.shape, classes=info.classes).parameters())
        assert line.split()[:2] == [name, f"{size:,}"]
        assert line.split()[3] == info.kind and line.endswith(info.about)


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'resnet19'; did you mean 'resnet18'\?"):
        build("resnet19", shape=(3, 32, 32), classes=10)


@pytest.mark.parametrize("name", IMAGES)
def test_image_model_for_text(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}' is for image data.*models that fit: gpt$"):
        build(name, shape=(128,), classes=256)


def test_text_model_for_images() -> None:
    with pytest.raises(ValueError, match=r"models that fit: simple_cnn, resnet18, resnet50$"):
        build("gpt", shape=(1, 28, 28), classes=10)


@pytest.mark.parametrize("shape", [(), (28, 28), (1, 0, 28), (-1,), (1, 1, 1, 1)])
def test_shapes_of_nothing_known(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got {shape}")):
        build("simple_cnn", shape=shape, classes=10)


def test_no_classes() -> None:
    with pytest.raises(ValueError, match="classes must be at least 1, got 0"):
        build("gpt", shape=(8,), classes=0)


def test_images_too_small_to_halve_twice() -> None:
    with pytest.raises(ValueError, match="3x9 leaves nothing"):
        build("simple_cnn", shape=(1, 3, 9), classes=10)
    assert build("simple_cnn", shape=(1, 4, 4), classes=10)(torch.randn(1, 1, 4, 4)).shape == (1, 10)


def test_text_longer_than_the_block() -> None:
    with pytest.raises(ValueError, match="9 tokens are more than this model's block of 8"):
        GPT(8)(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\(batch, length\), got shape \(8,\)"):
        GPT(8)(torch.zeros(8, dtype=torch.int64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "width 128 is not a multiple of heads 3"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_gpt_sizes_that_do_not_fit(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPT(8, **options)  # type: ignore[arg-type]
