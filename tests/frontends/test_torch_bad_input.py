"""What cannot be captured is refused in one message that names the place and the way out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from autopar.frontends.loading import LoadError, load_workload
from autopar.frontends.pytorch import build, capture, errors
from autopar.nouns.errors import UserError
from autopar.nouns.workload import Workload, WorkloadError, parallelize

B, D = 4, 8


def batch() -> dict[str, Tensor]:
    return {"x": torch.ones(B, D)}


class Model(nn.Module):
    """A linear layer and ``body``."""

    def __init__(self, body: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.body = body

    def forward(self, x: Tensor) -> object:
        return self.body(self.linear(x))


def refused(body: Callable[[Tensor], object], error: type[UserError]) -> str:
    with pytest.raises(error) as caught:
        capture(Workload(model=lambda: Model(body), batch=batch))
    assert caught.value.exit_code == 2
    return str(caught.value)


def here(text: str) -> str:
    """``file:line`` of the only line of this file with ``text`` in it."""
    lines = Path(__file__).read_text().splitlines()
    (line,) = (i for i, code in enumerate(lines, 1) if text in code and "here(" not in code)
    return f"{__file__}:{line}"


def test_data_dependent_control_flow() -> None:
    def body(x: Tensor) -> Tensor:
        if x.sum() > 3.25:
            return x.mean()
        return x.sum()

    message = refused(body, errors.DataDependentError)
    assert here("> 3.25:") in message
    assert "torch.where" in message


def test_item() -> None:
    message = refused(lambda x: x[: x.argmax().item()].mean(), errors.DataDependentError)
    assert here("x.argmax().item()") in message


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x.mean() + float(x.detach().numpy()[0, 0]),
        lambda x: x[[*x[0].long()], [*x[1].long()]].mean(),
    ],
)
def test_values_that_leave_torch(body: Callable[[Tensor], Tensor]) -> None:
    """To numpy, as a matching by scipy takes them, or to a list of places."""
    assert "needs the value of a tensor" in refused(body, errors.DataDependentError)


def test_boolean_indexing() -> None:
    message = refused(lambda x: x[x > 0.125].std(), errors.UnsupportedOpError)
    assert here("x[x > 0.125].std()") in message
    assert "rows that a mask chooses, as in x[mask], meet" in message
    message = refused(lambda x: x.sum() if len(x[x > 0.125]) else x.mean(), errors.CaptureError)
    assert here("if len(x[x > 0.125])") in message


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda x: x, "shape [4, 8]"),
        (lambda x: x.argmax(), "int64"),
        (lambda x: {"logits": x}, "logits"),
        (lambda x: 3.0, "float"),
        (lambda x: None, "NoneType"),
        (lambda x: (x, 3), "a tuple with no scalar"),
        (lambda x: (x, x.mean(), x.sum()), "a tuple with scalars at 1 and 2 without a loss"),
    ],
)
def test_no_scalar_loss(result: Callable[[Tensor], object], words: str) -> None:
    assert words in refused(result, errors.LossError)


def test_no_gradient_at_all() -> None:
    assert "no gradient" in refused(lambda x: x.detach().mean(), errors.LossError)


def test_complex_numbers_from_outside() -> None:
    class Complex(nn.Module):
        def __init__(self, parameter: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)
            turns = torch.ones(D // 2, dtype=torch.complex64)
            self.turns = nn.Parameter(turns) if parameter else turns

        def forward(self, x: Tensor) -> Tensor:
            z = x if x.is_complex() else torch.view_as_complex(self.linear(x).view(B, -1, 2))
            return torch.view_as_real(z * self.turns).mean()

    def complex_batch() -> dict[str, Tensor]:
        return {"x": torch.ones(B, D // 2, dtype=torch.complex64)}

    captured = capture(Workload(model=lambda: Complex(True), batch=batch))
    assert captured.graph.tensors["turns"].shape == (D // 2, 2)  # pairs of real numbers
    with pytest.raises(errors.UnsupportedOpError, match="batch\\['x'\\] is complex"):
        capture(Workload(model=lambda: Complex(False), batch=complex_batch))
    captured = capture(Workload(model=lambda: Complex(False), batch=batch))
    assert captured.graph.tensors["turns"].dtype == "complex64"
    assert {t.dtype for t in captured.graph.tensors.values()} == {"complex64", "float32"}


def test_writing_into_a_parameter() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.linear.bias.add_(1.0)
            return self.linear(x).mean()  # type: ignore[no-any-return]

    with pytest.raises(errors.MutationError, match=r"parameter 'linear\.bias'"):
        capture(Workload(model=Counting, batch=batch))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda x: torch.vmap(torch.sin)(x).mean(), "torch.vmap"),
        (lambda x: torch.view_as_real(torch.fft.fft(x).tanh()).mean(), "tanh on complex"),
        (
            lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True).mean(),
            "use_reentrant=False",
        ),
    ],
)
def test_what_a_capture_cannot_see(body: Callable[[Tensor], object], words: str) -> None:
    assert words in refused(body, errors.UnsupportedOpError)


def test_an_error_of_the_forward_itself() -> None:
    message = refused(lambda x: x.view(3, 7).mean(), errors.ForwardError)
    assert here("x.view(3, 7)") in message


def test_a_batch_entry_that_forward_does_not_know() -> None:
    with pytest.raises(errors.ForwardError, match="unexpected keyword argument 'y'"):
        capture(Workload(model=lambda: Model(torch.mean), batch=lambda: {"y": torch.ones(B, D)}))


def test_a_batch_of_two_sizes() -> None:
    def batch() -> dict[str, Tensor]:
        return {"x": torch.ones(4, 2), "y": torch.ones(3)}

    with pytest.raises(errors.BatchError, match=r"x \[4, 2\], y \[3\].*whole_inputs"):
        capture(Workload(model=lambda: Model(torch.mean), batch=batch))


@pytest.mark.parametrize("made", [[1], {}, {"x": 3}, {"x": torch.tensor(1.0)}])
def test_a_batch_that_is_none(made: object) -> None:
    with pytest.raises(errors.BatchError):
        capture(Workload(model=lambda: Model(torch.mean), batch=lambda: made))  # type: ignore[arg-type, return-value]


def test_a_model_that_is_none() -> None:
    with pytest.raises(errors.BuildError, match=r"dict, not an nn\.Module"):
        capture(Workload(model=dict, batch=batch))


def test_a_model_whose_sizes_a_first_forward_gives() -> None:
    with pytest.raises(errors.BuildError, match=r"0\.weight has no shape.*nn\.Linear\(64, 128\)"):
        capture(Workload(model=lambda: nn.Sequential(nn.LazyLinear(D)), batch=batch))


def test_a_constructor_that_fails() -> None:
    def model() -> nn.Module:
        raise ValueError("odd width 7")

    with pytest.raises(errors.BuildError, match="odd width 7"):
        capture(Workload(model=model, batch=batch))


@pytest.mark.parametrize(
    ("table", "advice"),
    [
        (lambda: nn.Embedding(4, D, sparse=True), "leave sparse out"),
        (lambda: nn.EmbeddingBag(4, D, sparse=True, mode="sum"), "leave sparse out"),
        (lambda: nn.EmbeddingBag(4, D, scale_grad_by_freq=True), "weigh the rows"),
    ],
)
def test_a_table_whose_gradients_are_others(table: Callable[[], nn.Module], advice: str) -> None:
    class Looked(Model):
        def __init__(self) -> None:
            super().__init__(lambda x: self.table(x.argmax(1, keepdim=True) % 4).mean())
            self.table = table()

    with pytest.raises(errors.UnsupportedOpError, match=rf"test_torch_bad_input.*{advice}"):
        capture(Workload(model=Looked, batch=batch))


def test_a_constructor_may_read_small_values() -> None:
    def model() -> nn.Module:
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        return Model(lambda x: (x * rates[2]).mean())

    graph = capture(Workload(model=model, batch=batch)).graph
    (scale,) = (op for op in graph.ops if op.kind == "mul")
    assert scale.attrs["other"] == 0.5


def test_a_constructor_may_read_weights_of_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        made = Model(torch.mean)
        orthogonal(made.linear)  # asks whether it is already
        return made

    state = torch.get_rng_state()
    graph = capture(Workload(model=model, batch=batch)).graph
    assert "linear.parametrizations.weight.original" in dict(graph.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(build, "WHOLE", 64)
    with pytest.raises(errors.BuildError, match=r"meta tensors\n.*\n.*large tensors, of which"):
        capture(Workload(model=model, batch=batch))


# -- workloads and files --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "neither"),
        ({"model": dict, "loss": dict, "init": dict}, "both"),
        ({"loss": dict}, "init"),
        ({"model": 3}, "lambda"),
        ({"model": dict, "optimizer": "adam"}, "adamw or sgd"),
        ({"model": dict, "precision": "fp8"}, "bfloat16"),
    ],
)
def test_workload_that_says_nonsense(fields: dict[str, object], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        Workload(batch=batch, **fields)  # type: ignore[arg-type]


def test_a_subclass_of_a_decorated_class_is_not_decorated(tmp_path: Path) -> None:
    @parallelize(batch=batch)
    class First(nn.Module):
        pass

    class Second(First):
        pass

    from autopar.nouns.workload import workload_of

    assert workload_of(First) is not None
    assert workload_of(Second) is None


MODEL = """
import autopar
{0} = autopar.Workload(model=dict, batch=dict)
"""


def written(folder: Path, text: str) -> str:
    file = folder / "some_model.py"
    file.write_text(text)
    return str(file)


def test_one_model(tmp_path: Path) -> None:
    assert load_workload(written(tmp_path, MODEL.format("one"))).model is dict
    assert load_workload(written(tmp_path, MODEL.format("one")) + ":one").model is dict


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("x = 1", "", "has no model"),
        (MODEL.format("one") + MODEL.format("two"), "", "2 models, one, two: say which"),
        (MODEL.format("one"), ":two", "two does not exist in .* it has one"),
        (MODEL.format("one") + "x = 1", ":x", "x is a int, not a model"),
        ("x = 1\ny = x / 0", "", r"some_model\.py:2: ZeroDivisionError"),
        ("x = (", "", r"some_model\.py:1: '\(' was never closed"),
        ("import sys; sys.exit(3)", "", "SystemExit: 3"),
    ],
)
def test_files_without_the_model(tmp_path: Path, text: str, name: str, words: str) -> None:
    with pytest.raises(LoadError, match=words):
        load_workload(written(tmp_path, text) + name)


def test_no_file() -> None:
    with pytest.raises(LoadError, match="is not a file"):
        load_workload("nowhere.py")


class TwoArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor, its_mask: Tensor) -> Tensor:
        loss: Tensor = (self.linear(x) * its_mask).mean()
        return loss


class NoForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)


@pytest.mark.parametrize(
    ("model", "line"),
    [(TwoArguments, "x: Tensor, its_mask"), (NoForward, "class NoForward(nn.Module)")],
)
def test_a_call_that_the_forward_does_not_take(model: type[nn.Module], line: str) -> None:
    with pytest.raises(errors.ForwardError) as caught:
        capture(Workload(model=model, batch=batch))
    lines = Path(__file__).read_text().splitlines()
    assert f"at {__file__}:{next(i for i, code in enumerate(lines, 1) if line in code)}: " in str(
        caught.value
    )


def test_shapes_that_do_not_fit_are_told_once() -> None:
    """Torch's own report of the same error is not shown beside ours, and only then not."""
    records: list[logging.LogRecord] = []

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Told()
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    message = refused(lambda x: (x @ torch.ones(D + 1, 2)).mean(), errors.ForwardError)
    assert here("torch.ones(D + 1, 2)") in message
    assert "[4, 8] X [9, 2]" in message
    assert not records
    logger.error("another's")
    logger.removeHandler(handler)
    assert len(records) == 1


def test_the_module_in_which_shapes_do_not_fit() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(D, D), nn.Linear(D + 1, D))

    with pytest.raises(errors.ForwardError, match=r"at Sequential \(module 1\): RuntimeError"):
        capture(Workload(model=model, batch=lambda: {"input": torch.ones(B, D)}))


class LastOfEach(Model):
    """The last row of each half of what a mask chooses, whichever samples it has them of."""

    def __init__(self) -> None:
        super().__init__(torch.mean)
        self.head = nn.Sequential(nn.Linear(3, 3))

    def forward(self, x: Tensor) -> object:
        chosen = self.linear(x)[:, :, None].expand(B, D, 3)[x > 0.5]
        return self.head(chosen.view(B // 2, -1, 3)[:, -1, :]).mean()


def test_rows_of_a_mask_as_so_many_of_some_samples() -> None:
    """Those lie as many numbers apart as there are rows, whatever layer takes them."""
    with pytest.raises(errors.UnsupportedOpError, match="rows that a mask chooses"):
        capture(Workload(model=LastOfEach, batch=batch))
