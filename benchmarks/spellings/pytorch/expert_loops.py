"""Experts that a loop goes through one by one, each on the words that chose it."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.spellings.pytorch.frame import C, layer
from benchmarks.spellings.pytorch.routing import EXPERTS, Expert


class Routed(nn.Module):
    """A gate and its experts; how a word's experts run is the spelling."""

    def __init__(self, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(C, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])


@layer(
    "experts in a loop by hand",
    "where of a mask, written by index_add in place",
    "huggingface/transformers 4.40, models/mixtral/modeling_mixtral.py, by slots",
)
class IndexAdd(Routed):
    def forward(self, x):
        flat = x.view(-1, C)
        weights, selected = torch.topk(self.gate(flat), self.top_k)
        weights = F.softmax(weights, dim=1, dtype=torch.float).to(x.dtype)
        results = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            batch_idx, nth_expert = torch.where(selected == i)
            results.index_add_(
                0, batch_idx, weights[batch_idx, nth_expert, None] * expert(flat[batch_idx])
            )
        return results.view_as(x)


@layer(
    "experts in a loop by hand",
    "places added to by an index",
    "mistralai/mistral-inference, src/mistral_inference/moe.py",
)
class PlacesAdded(Routed):
    def forward(self, inputs):
        b, s, d = inputs.shape
        inputs = inputs.reshape(b * s, d)
        gate_logits = self.gate(inputs)
        weights, selected_experts = torch.topk(gate_logits, self.top_k)
        weights = F.softmax(weights, dim=1, dtype=torch.float).to(inputs.dtype)
        results = torch.zeros_like(inputs)
        for i, expert in enumerate(self.experts):
            batch_idx, nth_expert = torch.where(selected_experts == i)
            results[batch_idx] += weights[batch_idx, nth_expert, None] * expert(inputs[batch_idx])
        return results.reshape(b, s, d)


@layer(
    "experts in a loop by hand",
    "counts that skip experts, and a shared one beside",
    "deepseek-ai/DeepSeek-V3, inference/model.py",
)
class Counted(Routed):
    def __init__(self):
        super().__init__()
        self.shared_experts = Expert()

    def forward(self, x):
        shape = x.size()
        x = x.view(-1, C)
        scores = self.gate(x).softmax(dim=-1, dtype=torch.float32)
        indices = torch.topk(scores, self.top_k, dim=-1)[1]
        weights = scores.gather(1, indices).type_as(x)
        y = torch.zeros_like(x)
        for i in range(EXPERTS):
            idx, top = torch.where(indices == i)
            y[idx] += self.experts[i](x[idx]) * weights[idx, top, None]
        return (y + self.shared_experts(x)).view(shape)


@layer(
    "experts in a loop by hand",
    "one expert a word, chosen rows scattered back",
    "Fedus et al. 2022, labmlai/annotated_deep_learning_paper_implementations, switch/__init__.py",
)
class OneEach(Routed):
    def __init__(self):
        super().__init__(top_k=1)

    def forward(self, x):
        batch_size, seq_len, d_model = x.shape
        x = x.reshape(-1, d_model)
        route_prob = F.softmax(self.gate(x), dim=-1)
        route_prob_max, routes = torch.max(route_prob, dim=-1)
        final_output = x.new_zeros(x.shape)
        for i in range(EXPERTS):
            index = torch.eq(routes, i).nonzero(as_tuple=True)[0]
            final_output[index, :] = self.experts[i](x[index, :])
        final_output = final_output * route_prob_max.view(-1, 1)
        return final_output.reshape(batch_size, seq_len, d_model)


@layer(
    "experts in a loop by hand",
    "slots one after the other, each with masks of words",
    "Jiang et al. 2024, Mixtral of Experts, section 2.1, term by term",
)
class BySlot(Routed):
    def forward(self, x):
        flat = x.reshape(-1, C)
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top_k, dim=-1)
        out = torch.zeros_like(flat)
        for slot in range(self.top_k):
            for number, expert in enumerate(self.experts):
                mask = chosen[:, slot] == number
                if mask.any():
                    out[mask] = out[mask] + weights[mask, slot].unsqueeze(-1) * expert(flat[mask])
        return out.view(x.shape)
