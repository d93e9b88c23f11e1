"""Norms and scaling without a synchronisation for each tensor equal Megatron's."""

from collections.abc import Iterator

import pytest
import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads

from asyncrl.engines.megatron.setup.gradient_norm import l2_norm, scale_into, use_foreach_norms
from tests.engines.megatron.layouts import layout, processes
from tests.engines.megatron.tiny import free_port

FLAG = torch.zeros(1, dtype=torch.int)
CHUNK = 2048 * 32


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """Megatron's own norm needs the emulation of CUDA."""
    with processes(0, 1, free_port()), layout():
        yield


def gradients(*dtypes: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (7,), (), (2, 3, 4), (0, 4)]
    return [torch.randn(shape, generator=generator).mul(9).to(dtype) for dtype in dtypes for shape in shapes]


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.bfloat16, torch.float32)])
def test_the_norm_is_that_of_all_numbers_together(dtypes: tuple[torch.dtype, ...]) -> None:
    grads = gradients(*dtypes)
    norm, by_tensor = l2_norm(CHUNK, FLAG, [grads], False)
    assert (norm.shape, norm.dtype, by_tensor) == ((1,), torch.float32, None)
    exact = torch.cat([grad.double().flatten() for grad in grads]).norm().item()
    assert norm.item() == pytest.approx(exact, rel=1e-6)
    theirs, _ = utils.local_multi_tensor_l2_norm(CHUNK, FLAG, [grads], False)
    # Megatron rounds the norm of a bfloat16 tensor to bfloat16.
    assert norm.item() == pytest.approx(theirs.item(), rel=1e-6 if torch.bfloat16 not in dtypes else 1e-3)


def test_no_tensors_have_the_norm_zero() -> None:
    norm, _ = l2_norm(CHUNK, FLAG, [[]], False)
    assert norm.tolist() == [0.0]
    scale_into(CHUNK, FLAG, [[], []], 0.5)


def test_a_number_that_is_not_finite_shows_in_the_norm() -> None:
    for bad in (float("nan"), float("inf")):
        norm, _ = l2_norm(CHUNK, FLAG, [[torch.ones(3), torch.tensor([1.0, bad])]], False)
        assert not norm.isfinite().item()


def test_norms_of_single_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="norm of each gradient"):
        l2_norm(CHUNK, FLAG, [gradients(torch.float32)], True)


@pytest.mark.parametrize("in_place", [True, False])
def test_scaling_equals_megatron_s(in_place: bool) -> None:
    mine, theirs = gradients(torch.float32, torch.bfloat16), gradients(torch.float32, torch.bfloat16)
    targets = mine if in_place else [torch.empty_like(grad) for grad in mine]
    scale_into(CHUNK, FLAG, [mine, targets], 0.3)
    utils.local_multi_tensor_scale(CHUNK, FLAG, [theirs, theirs], 0.3)
    for one, other in zip(targets, theirs, strict=True):
        # torch rounds the factor to the tensor's dtype; Megatron clips float32 gradients alone.
        tolerance = 0.0 if one.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(one, other, rtol=tolerance, atol=0.0)
    if not in_place:
        untouched = gradients(torch.float32, torch.bfloat16)
        assert all(torch.equal(one, other) for one, other in zip(mine, untouched, strict=True))


def test_megatron_s_local_functions_are_replaced_and_kernels_of_other_packages_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kernel() -> None:
        """Stand for TransformerEngine's."""

    monkeypatch.setattr(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", kernel)
    use_foreach_norms()
    assert clip_grads.l2_norm_impl is l2_norm
    assert clip_grads.multi_tensor_scale_impl is kernel


def test_megatron_computes_norms_and_clips_through_them() -> None:
    use_foreach_norms()
    weights = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in gradients(torch.float32)]
    for weight, grad in zip(weights, gradients(torch.float32), strict=True):
        weight.grad = grad.clone()
    norm = clip_grads.get_grad_norm_fp32([weight.grad for weight in weights])
    expected = torch.nn.utils.get_total_norm(gradients(torch.float32)).item()
    assert norm == pytest.approx(expected, rel=1e-6)
    clip_grads.clip_grad_by_total_norm_fp32(weights, 0.5, norm)
    clipped = clip_grads.get_grad_norm_fp32([weight.grad for weight in weights])
    assert clipped == pytest.approx(0.5, rel=1e-5)
