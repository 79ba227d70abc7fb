"""Recurrences over time: states carried from step to step, and sums along the sequence."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.spellings.pytorch.frame import C, H, layer


@layer(
    "recurrence over time",
    "gru cells in a loop with append and stack",
    "docs.pytorch.org, torch.nn.GRUCell, example",
)
class CellLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRUCell(C, C)

    def forward(self, x):
        hx = x.new_zeros(x.size(0), C)
        output = []
        for i in range(x.size(1)):
            hx = self.rnn(x[:, i], hx)
            output.append(hx)
        return torch.stack(output, dim=1)


@layer(
    "recurrence over time",
    "lstm by hand with chunk over unbound steps",
    "pytorch/pytorch, benchmarks/fastrnns/custom_lstms.py",
)
class HandLSTM(nn.Module):
    def __init__(self, input_size=C, hidden_size=C):
        super().__init__()
        self.hidden_size = hidden_size
        self.weight_ih = nn.Parameter(torch.randn(4 * hidden_size, input_size) * 0.1)
        self.weight_hh = nn.Parameter(torch.randn(4 * hidden_size, hidden_size) * 0.1)
        self.bias_ih = nn.Parameter(torch.zeros(4 * hidden_size))
        self.bias_hh = nn.Parameter(torch.zeros(4 * hidden_size))

    def cell(self, x, state):
        hx, cx = state
        gates = (
            torch.mm(x, self.weight_ih.t())
            + self.bias_ih
            + torch.mm(hx, self.weight_hh.t())
            + self.bias_hh
        )
        ingate, forgetgate, cellgate, outgate = gates.chunk(4, 1)
        cy = torch.sigmoid(forgetgate) * cx + torch.sigmoid(ingate) * torch.tanh(cellgate)
        hy = torch.sigmoid(outgate) * torch.tanh(cy)
        return hy, (hy, cy)

    def forward(self, x):
        inputs = x.transpose(0, 1).unbind(0)
        state = tuple(torch.zeros(x.size(0), self.hidden_size).to(x) for _ in range(2))
        outputs = []
        for i in range(len(inputs)):
            out, state = self.cell(inputs[i], state)
            outputs += [out]
        return torch.stack(outputs).transpose(0, 1)


@layer(
    "recurrence over time",
    "preallocated output written by index",
    "bentrevett/pytorch-seq2seq, 1 - Sequence to Sequence Learning with Neural Networks.ipynb",
)
class WrittenOutput(nn.Module):
    def __init__(self, hid_dim=C):
        super().__init__()
        self.hid_dim = hid_dim
        self.rnn = nn.RNNCell(C, hid_dim, nonlinearity="tanh")
        self.fc_out = nn.Linear(hid_dim, C)

    def forward(self, src):
        batch_size, src_len = src.shape[0], src.shape[1]
        outputs = torch.zeros(batch_size, src_len, C).to(src.device)
        hidden = torch.zeros(batch_size, self.hid_dim, device=src.device)
        for t in range(0, src_len):
            hidden = self.rnn(src[:, t, :], hidden)
            outputs[:, t] = self.fc_out(hidden)
        return outputs


@layer(
    "recurrence over time",
    "lstm module of two layers in both directions",
    "yunjey/pytorch-tutorial, tutorials/02-intermediate/bidirectional_recurrent_neural_network",
)
class BiRNN(nn.Module):
    def __init__(self, input_size=C, hidden_size=C // 2, num_layers=2):
        super().__init__()
        self.hidden_size, self.num_layers = hidden_size, num_layers
        self.lstm = nn.LSTM(
            input_size, hidden_size, num_layers, batch_first=True, bidirectional=True
        )
        self.fc = nn.Linear(hidden_size * 2, C)

    def forward(self, x):
        h0 = torch.zeros(self.num_layers * 2, x.size(0), self.hidden_size).to(x.device)
        c0 = torch.zeros(self.num_layers * 2, x.size(0), self.hidden_size).to(x.device)
        self.lstm.flatten_parameters()
        out, _ = self.lstm(x, (h0, c0))
        return self.fc(out)


@layer(
    "recurrence over time",
    "elman cell with einsum of its own weights",
    "labmlai/annotated_deep_learning_paper_implementations, labml_nn/hypernetworks/hyper_lstm.py",
)
class EinsumCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.w_h, self.w_x = (nn.Parameter(torch.zeros(C, C)) for _ in range(2))
        self.b = nn.Parameter(torch.zeros(C))
        self.h0 = nn.Parameter(torch.zeros(C))
        for weight in (self.w_h, self.w_x):
            nn.init.orthogonal_(weight, gain=0.7)

    def step(self, x, h):
        y = torch.einsum("ij,bj->bi", self.w_h, h) + torch.einsum("ij,bj->bi", self.w_x, x)
        return torch.tanh(y + self.b)

    def forward(self, x):
        h = self.h0.expand(x.shape[0], -1)
        out = []
        for x_t in torch.unbind(x, dim=1):
            h = self.step(x_t, h)
            out.append(h.unsqueeze(1))
        return torch.cat(out, 1)


def log_g(x):
    return torch.where(x >= 0, (F.relu(x) + 0.5).log(), -F.softplus(-x))


@layer(
    "sums along time",
    "logcumsumexp of values less the summed log decays",
    "lucidrains/minGRU-pytorch, minGRU_pytorch/minGRU.py",
)
class MinGRU(nn.Module):
    def __init__(self, dim=C):
        super().__init__()
        self.to_hidden_and_gate = nn.Linear(dim, dim * 2, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        hidden, gate = self.to_hidden_and_gate(x).chunk(2, dim=-1)
        log_coeffs = -F.softplus(gate)
        log_values = -F.softplus(-gate) + log_g(hidden)
        a_star = log_coeffs.cumsum(dim=1)
        log_h = a_star + (log_values - a_star).logcumsumexp(dim=1)
        return self.to_out(log_h.exp())


@layer(
    "sums along time",
    "decayed state in a loop over the steps",
    "state-spaces/mamba, mamba_ssm/ops/selective_scan_interface.py, selective_scan_ref",
)
class SelectiveScan(nn.Module):
    def __init__(self, d_state=4, dt_rank=2):
        super().__init__()
        self.d_state, self.dt_rank = d_state, dt_rank
        self.norm = nn.LayerNorm(C)
        self.x_proj = nn.Linear(C, dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(dt_rank, C)
        steps = torch.arange(1, d_state + 1, dtype=torch.float32).repeat(C, 1)
        self.A_log = nn.Parameter(torch.log(steps))
        self.D = nn.Parameter(torch.ones(C))

    def forward(self, x):
        u = self.norm(x)
        split = [self.dt_rank, self.d_state, self.d_state]
        delta, b, c = torch.split(self.x_proj(u), split, dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        a = -torch.exp(self.A_log.float())
        delta_a = torch.exp(torch.einsum("bld,dn->bldn", delta, a))
        delta_b_u = torch.einsum("bld,bln,bld->bldn", delta, b, u)
        state = a.new_zeros((u.shape[0], C, self.d_state))
        ys = []
        for i in range(u.shape[1]):
            state = delta_a[:, i] * state + delta_b_u[:, i]
            ys.append(torch.einsum("bdn,bn->bd", state, c[:, i, :]))
        return torch.stack(ys, dim=1) + u * self.D


@layer(
    "sums along time",
    "linear attention by cumsum of outer products",
    "lucidrains/performer-pytorch, performer_pytorch/performer_pytorch.py",
)
class LinearAttention(nn.Module):
    def __init__(self, heads=H):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(C, 3 * C, bias=False)
        self.to_out = nn.Linear(C, C)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.to_qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        k_cumsum = k.cumsum(dim=-2) + 1e-6
        d_inv = 1.0 / torch.einsum("...nd,...nd->...n", q, k_cumsum.type_as(q))
        context = torch.einsum("...nd,...ne->...nde", k, v).cumsum(dim=-3)
        out = torch.einsum("...nde,...nd,...n->...ne", context, q, d_inv)
        return self.to_out(out.transpose(1, 2).flatten(2))


@layer(
    "sums along time",
    "chunks with a state carried between them",
    "microsoft/torchscale, torchscale/component/multiscale_retention.py",
)
class ChunkedRetention(nn.Module):
    def __init__(self, chunk_size=4):
        super().__init__()
        self.chunk_size = chunk_size
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(C, C, bias=False) for _ in range(4)
        )
        self.group_norm = nn.LayerNorm(C // H, elementwise_affine=False)
        decay = torch.log(1 - 2 ** (-5 - torch.arange(H, dtype=torch.float)))
        index = torch.arange(chunk_size).float()
        ahead = index[:, None] - index[None, :]
        inner = torch.exp(ahead[None] * decay[:, None, None]).tril()
        self.register_buffer("inner_mask", inner)
        self.register_buffer("query_decay", torch.exp(decay[:, None] * (index + 1))[..., None])
        self.register_buffer("value_decay", inner[:, -1].unsqueeze(-1))
        self.register_buffer("cross_decay", torch.exp(decay * chunk_size)[:, None, None])

    def forward(self, x):
        bsz, tgt_len, _ = x.size()
        num_chunks = tgt_len // self.chunk_size
        shape = (bsz, num_chunks, self.chunk_size, H, C // H)
        q = self.q_proj(x).view(shape).transpose(2, 3)
        k = (self.k_proj(x) * (C // H) ** -0.5).view(shape).transpose(2, 3)
        v = self.v_proj(x).view(shape).transpose(2, 3)
        inner_output = ((q @ k.transpose(-1, -2)) * self.inner_mask) @ v
        kv = k.transpose(-1, -2) @ (v * self.value_decay)
        kv_state = torch.zeros(bsz, H, C // H, C // H).to(v)
        kv_recurrent = []
        for i in range(num_chunks):
            kv_recurrent.append(kv_state)
            kv_state = kv_state * self.cross_decay + kv[:, i]
        cross_output = (q * self.query_decay) @ torch.stack(kv_recurrent, dim=1)
        output = self.group_norm(inner_output + cross_output)
        return self.out_proj(output.transpose(2, 3).reshape(bsz, tgt_len, C))


def interleave(even, odd):
    length = even.shape[1] + odd.shape[1]
    missing = even.shape[1] - odd.shape[1]
    both = torch.stack((even, F.pad(odd, (0, 0, 0, missing))), dim=2)
    return both.flatten(1, 2)[:, :length]


def associative_scan(operator, elems):
    """Of pairs of steps first, of every second step then."""
    if elems[0].shape[1] < 2:
        return elems
    reduced = operator([e[:, :-1:2] for e in elems], [e[:, 1::2] for e in elems])
    odd = associative_scan(operator, reduced)
    even = operator([e[:, : (n.shape[1] - 1) // 2] for e, n in zip(odd, elems, strict=True)],
                    [e[:, 2::2] for e in elems])  # fmt: skip
    even = [torch.cat([e[:, :1], r], dim=1) for e, r in zip(elems, even, strict=True)]
    return [interleave(e, o) for e, o in zip(even, odd, strict=True)]


def binary_operator(a, b):
    a_i, kv_i = a
    a_j, kv_j = b
    return a_j * a_i, torch.addcmul(kv_j, a_j, kv_i)


@layer(
    "sums along time",
    "associative scan by recursion over even and odd steps",
    "lucidrains/gateloop-transformer, gateloop_transformer/associative_scan.py",
)
class GateLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_qkva = nn.Linear(C, 3 * C)
        self.shift = nn.Parameter(torch.full((C,), math.log(9.0)))
        self.post_ln = nn.LayerNorm(C)

    def forward(self, x):
        q, kv, a = self.to_qkva(x).chunk(3, dim=-1)
        _, kv = associative_scan(binary_operator, (torch.sigmoid(a + self.shift), kv))
        return self.post_ln(q * kv)
