"""Gates that replace residual sums, of the Gated Transformer-XL (GTrXL).

[Parisotto et al., 2019](https://arxiv.org/abs/1910.06764), section 3.2. A gate joins the input x of a sublayer and its
output y after a ReLU. Layer normalisation comes first (`pre_lnorm`), so that x itself passes from the first layer to
the last: the paper's identity map reordering.
"""

import torch
from torch import nn

from .configuration_transfo_xl import TransfoXLConfig


class Gate(nn.Module):
    """Base class of the gates; each has square matrices without biases, as the paper writes them.

    Args:
        config ([`TransfoXLConfig`]): Gives `d_model` and `gating_bias`.
    """

    matrices: tuple[str, ...] = ()
    has_bias = False

    def __init__(self, config: TransfoXLConfig):
        super().__init__()
        for name in self.matrices:
            setattr(self, name, nn.Linear(config.d_model, config.d_model, bias=False))
        if self.has_bias:
            # b_g, filled by the models' initialisation
            self.gate_bias = nn.Parameter(torch.empty(config.d_model))

    def forward(self, residual: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """g(x, y): the input `residual` and the output of a sublayer, both `(B, Q, d_model)`, to one tensor."""
        raise NotImplementedError


class ResidualGate(Gate):
    """x + y: identity map reordering alone (TrXL-I)."""

    def forward(self, residual: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return residual + output


class InputGate(Gate):
    """sigmoid(W x) * x + y."""

    matrices = ("w",)
    w: nn.Linear

    def forward(self, residual: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.w(residual)) * residual + output


class OutputGate(Gate):
    """x + sigmoid(W x - b) * y."""

    matrices, has_bias = ("w",), True
    w: nn.Linear

    def forward(self, residual: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return residual + torch.sigmoid(self.w(residual) - self.gate_bias) * output


class HighwayGate(Gate):
    """s * x + (1 - s) * y with s = sigmoid(W x + b)."""

    matrices, has_bias = ("w",), True
    w: nn.Linear

    def forward(self, residual: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        carried = torch.sigmoid(self.w(residual) + self.gate_bias)
        return carried * residual + (1 - carried) * output


class SigmoidTanhGate(Gate):
    """x + sigmoid(W y - b) * tanh(U y)."""

    matrices, has_bias = ("w", "u"), True
    w: nn.Linear
    u: nn.Linear

    def forward(self, residual: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return residual + torch.sigmoid(self.w(output) - self.gate_bias) * torch.tanh(self.u(output))


class GRUGate(Gate):
    """(1 - z) * x + z * h, with

    - r = sigmoid(W_r y + U_r x),
    - z = sigmoid(W_z y + U_z x - b),
    - h = tanh(W_h y + U_h (r * x)).
    """

    matrices, has_bias = ("w_r", "u_r", "w_z", "u_z", "w_h", "u_h"), True
    w_r: nn.Linear
    u_r: nn.Linear
    w_z: nn.Linear
    u_z: nn.Linear
    w_h: nn.Linear
    u_h: nn.Linear

    def forward(self, residual: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        reset = torch.sigmoid(self.w_r(output) + self.u_r(residual))
        update = torch.sigmoid(self.w_z(output) + self.u_z(residual) - self.gate_bias)
        candidate = torch.tanh(self.w_h(output) + self.u_h(reset * residual))
        return (1 - update) * residual + update * candidate


GATES: dict[str, type[Gate]] = {
    "residual": ResidualGate,
    "input": InputGate,
    "output": OutputGate,
    "highway": HighwayGate,
    "sigmoid_tanh": SigmoidTanhGate,
    "gru": GRUGate,
}


def make_gate(config: TransfoXLConfig) -> Gate | None:
    """The gate of a sublayer, `None` without gating."""
    return None if config.gating is None else GATES[config.gating](config)


def join(gate: Gate | None, residual: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The residual sum of a sublayer, or its gate after a ReLU, `(B, Q, d_model)`."""
    return residual + output if gate is None else gate(residual, torch.relu(output))


__all__ = ["GATES", "Gate", "join", "make_gate"]
