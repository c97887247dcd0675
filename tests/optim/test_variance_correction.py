"""The corrected second moment against its definition, the bare optimizer and a joint batch."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.optim import VarianceCorrection, is_adam_family
from tests.optim.gradients import FAMILY, give_gradients, parameters

Make = Callable[..., Optimizer]


def second_moment(optimizer: VarianceCorrection, param: Tensor) -> Tensor:
    """Return the divisor of the last step, before its square root and bias correction."""
    state = optimizer.state[param]
    moment: Tensor = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    return moment


def definition(grads: list[Tensor], beta2: float, workers: float) -> Tensor:
    """The corrected second moment of design formula, with its bias left in: c·[m² + (v − m²)/n]."""
    v, mean = torch.zeros_like(grads[0]), torch.zeros_like(grads[0])
    for grad in grads:
        v = beta2 * v + (1 - beta2) * grad**2
        mean = beta2 * mean + (1 - beta2) * grad
    bias = 1 - beta2 ** len(grads)
    v, mean = v / bias, mean / bias
    return bias * (mean**2 + (v - mean**2) / workers)


@pytest.mark.parametrize("make", FAMILY.values(), ids=FAMILY.keys())
@pytest.mark.parametrize("workers", [1.5, 4, 64])
def test_second_moment_follows_its_definition_as_workers_change(make: Make, workers: float) -> None:
    params = parameters(dtype=torch.float64)
    inner = make(params, lr=0.01, betas=(0.8, 0.95))
    optimizer = VarianceCorrection(inner, num_workers=3)
    group = optimizer.param_groups[0]
    decay = 0.0 if group["decoupled_weight_decay"] else group["weight_decay"]
    seen: dict[nn.Parameter, list[Tensor]] = {param: [] for param in params}
    largest = {param: torch.zeros_like(param) for param in params}

    for step in range(25):
        optimizer.num_workers = workers if step >= 10 else 3
        give_gradients(params, step)
        for param in params:
            if param.grad is not None:
                sign = -1 if group["maximize"] else 1
                seen[param].append(sign * param.grad + decay * param.detach())
        optimizer.step()
        for param in params:
            if param.grad is None:
                continue
            expected = definition(seen[param], 0.95, optimizer.num_workers)
            if group.get("amsgrad"):
                expected = largest[param] = torch.maximum(largest[param], expected)
            torch.testing.assert_close(second_moment(optimizer, param), expected, rtol=1e-10, atol=0.0)


def test_adam_divides_by_the_corrected_second_moment() -> None:
    param = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = VarianceCorrection(Adam([param], lr=0.1, betas=(0.0, 0.9), eps=0.0), num_workers=5)
    generator = torch.Generator().manual_seed(3)
    grads = [torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(6)]
    for grad in grads:
        before = param.detach().clone()
        param.grad = grad
        optimizer.step()

    moment = definition(grads, 0.9, 5) / (1 - 0.9**6)
    torch.testing.assert_close(before - param.detach(), 0.1 * grads[-1] / moment.sqrt())


SCALES = [(0.0, 1.0), (0.5, 2.0), (1e-4, 1e-3), (30.0, 10.0)]  # mean and deviation of a local gradient


@pytest.mark.parametrize("workers", [2, 4, 16])
@pytest.mark.parametrize("seed", [0, 1])
def test_second_moment_is_that_of_the_joint_batch(workers: int, seed: int) -> None:
    beta2, steps, size = 0.98, 250, 1000
    local, joint = ([nn.Parameter(torch.zeros(size)) for _ in SCALES] for _ in range(2))
    bare = [nn.Parameter(torch.zeros(size)) for _ in SCALES]
    plain = partial(Adam, lr=0.0, betas=(0.9, beta2))
    corrected = VarianceCorrection(plain(local), num_workers=workers)
    optimizers: list[Optimizer] = [corrected, plain(bare), plain(joint)]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for index, (mean, deviation) in enumerate(SCALES):
            mine, others = torch.randn(2, size, generator=generator)
            local[index].grad = bare[index].grad = mean + deviation * mine
            joint[index].grad = mean + deviation * (mine + math.sqrt(workers - 1) * others) / workers
        for optimizer in optimizers:
            optimizer.step()

    for index, (_, deviation) in enumerate(SCALES):
        target = optimizers[2].state[joint[index]]["exp_avg_sq"].double()
        surplus = deviation**2 * (1 - 1 / workers)
        # The mean is itself an average over a window, so that it keeps this share of the variance (docs).
        kept = surplus * (1 - beta2) / (1 + beta2) * (1 + beta2**steps)
        expected = {
            second_moment(corrected, local[index]): kept,
            optimizers[1].state[bare[index]]["exp_avg_sq"]: surplus * (1 - beta2**steps),
        }
        for moment, excess in expected.items():
            difference = moment.double() - target
            error = difference.std().item() / math.sqrt(size)
            assert abs(difference.mean().item() - excess) < 4 * error
        assert surplus > 10 * error


@pytest.mark.parametrize("workers", [1, 2, 1000])
def test_second_moment_is_never_negative(workers: int) -> None:
    patterns = {
        "constant": lambda step: torch.full((64,), 1e3),
        "outlier then nothing": lambda step: torch.full((64,), 1e6 if step == 3 else 0.0),
        "sign flips": lambda step: torch.full((64,), (-1.0) ** step),
        "jumps": lambda step: torch.full((64,), 10.0 ** (step % 7 - 3)),
        "shrinking": lambda step: torch.full((64,), 0.5**step),
    }
    params = [nn.Parameter(torch.ones(64)) for _ in patterns]
    optimizer = VarianceCorrection(Adam(params, lr=1e-3, betas=(0.9, 0.9)), num_workers=workers)
    for step in range(150):
        if workers > 1:
            optimizer.num_workers = workers if step % 5 else 1 + step % 3
        for param, pattern in zip(params, patterns.values(), strict=True):
            param.grad = pattern(step)
        optimizer.step()
        for param in params:
            assert (second_moment(optimizer, param) >= 0).all()
            assert param.isfinite().all()


@pytest.mark.parametrize("maximize", [False, True])
def test_takes_over_from_a_bare_optimizer(maximize: bool) -> None:
    params = parameters()
    bare = Adam(params, lr=0.01, maximize=maximize)
    for step in range(40):
        give_gradients(params, step, skips=False)
        bare.step()
    plain, first = ([bare.state[param][key].clone() for param in params] for key in ("exp_avg_sq", "exp_avg"))
    optimizer = VarianceCorrection(bare, num_workers=4)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()

    for v, m, param in zip(plain, first, params, strict=True):
        mean_square = (m / (1 - 0.9**40)) ** 2
        bias = 1 - 0.999**40
        expected = bias * mean_square + (v - bias * mean_square) / 4  # one step of beta2 changes it by 2 %
        torch.testing.assert_close(second_moment(optimizer, param), expected, rtol=0.05, atol=0.0)


def test_flat_buckets_and_other_layouts_give_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(4, 3, 5, 5, generator=generator) for _ in range(5)]
    bucket = torch.zeros(1000)
    layouts = {
        "own": nn.Parameter(torch.zeros(4, 3, 5, 5)),
        "bucket": nn.Parameter(bucket[100:400].view(4, 3, 5, 5)),
        "channels last": nn.Parameter(torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last)),
    }
    for param in layouts.values():
        optimizer = VarianceCorrection(Adam([param], lr=0.1, weight_decay=0.1), num_workers=4)
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()

    assert torch.equal(layouts["own"], bucket[100:400].view(4, 3, 5, 5))
    torch.testing.assert_close(layouts["channels last"].detach().contiguous(), layouts["own"].detach())
    assert not bucket[:100].any()
    assert not bucket[400:].any()


def test_grad_scaler_skips_and_unscales() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = VarianceCorrection(AdamW([param], lr=0.1, fused=True), num_workers=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((param * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, torch.ones(3))
    optimizer.zero_grad()
    scaler.scale((param * 2.0).sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(second_moment(optimizer, param), torch.full((3,), 0.004))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(parameters(), lr=0.1), "SGD"),
        (lambda: VarianceCorrection(Adam(parameters())), "VarianceCorrection"),
        (lambda: Adam(parameters(), differentiable=True), "differentiable"),
        (lambda: Adam(parameters(), capturable=True), "capturable"),
        (lambda: Adam(parameters(dtype=torch.bfloat16)), "bfloat16"),
    ],
)
def test_refuses_what_it_cannot_correct(make: Callable[[], Optimizer], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        VarianceCorrection(make(), num_workers=2)


@pytest.mark.parametrize("workers", [0, 0.5, -1, math.inf, math.nan])
def test_refuses_impossible_numbers_of_workers(workers: float) -> None:
    optimizer = VarianceCorrection(Adam(parameters()), num_workers=2)
    with pytest.raises(ConfigurationError):
        optimizer.num_workers = workers
    assert optimizer.num_workers == 2


def test_family() -> None:
    assert all(is_adam_family(make(parameters(), lr=0.1)) for make in FAMILY.values())
    assert not is_adam_family(SGD(parameters(), lr=0.1))
