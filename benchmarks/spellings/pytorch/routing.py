"""Experts, and other choices that a model makes for each word, hard or soft."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.spellings.pytorch.frame import Body, C, V, layer, model

EXPERTS = 4


class Expert(nn.Module):
    def __init__(self, d=C, hidden=C):
        super().__init__()
        self.w1, self.w2 = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)))


@layer(
    "routing by top k",
    "mask per expert with gates scattered over minus infinity",
    "AviSoori1x/makeMoE, makeMoE.py",
)
class MaskPerExpert(nn.Module):
    def __init__(self, top_k=2):
        super().__init__()
        self.topkroute_linear = nn.Linear(C, EXPERTS)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        self.top_k = top_k

    def router(self, x):
        logits = self.topkroute_linear(x)
        top_k_logits, indices = logits.topk(self.top_k, dim=-1)
        zeros = torch.full_like(logits, float("-inf"))
        sparse_logits = zeros.scatter(-1, indices, top_k_logits)
        return F.softmax(sparse_logits, dim=-1), indices

    def forward(self, x):
        gating_output, indices = self.router(x)
        final_output = torch.zeros_like(x)
        flat_x = x.view(-1, x.size(-1))
        flat_gating_output = gating_output.view(-1, gating_output.size(-1))
        for i, expert in enumerate(self.experts):
            expert_mask = (indices == i).any(dim=-1)
            flat_mask = expert_mask.view(-1)
            if flat_mask.any():
                expert_output = expert(flat_x[flat_mask])
                gating_scores = flat_gating_output[flat_mask, i].unsqueeze(1)
                final_output[expert_mask] += (expert_output * gating_scores).squeeze(1)
        return final_output


@layer(
    "routing by top k",
    "loop over hit experts with where and index_add",
    "huggingface/transformers, models/mixtral/modeling_mixtral.py",
)
class HitExperts(nn.Module):
    def __init__(self, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(C, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, hidden_states):
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        router_logits = self.gate(hidden_states)
        routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
        routing_weights, selected = torch.topk(routing_weights, self.top_k, dim=-1)
        routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
        routing_weights = routing_weights.to(hidden_states.dtype)
        final = torch.zeros_like(hidden_states)
        expert_mask = F.one_hot(selected, num_classes=EXPERTS).permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hit:
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
            current_state = hidden_states[None, top_x].reshape(-1, hidden_dim)
            current = expert_layer(current_state) * routing_weights[top_x, idx, None]
            final.index_add_(0, top_x, current.to(hidden_states.dtype))
        return final.reshape(batch_size, sequence_length, hidden_dim)


@layer(
    "routing by top k",
    "stacked weights gathered by expert number and einsum",
    "pytorch-labs/gpt-fast, mixtral-moe/model.py",
)
class GatheredWeights(nn.Module):
    def __init__(self, num_activated_experts=2):
        super().__init__()
        self.gate = nn.Linear(C, EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.empty(EXPERTS, C, C))
        self.w2 = nn.Parameter(torch.empty(EXPERTS, C, C))
        self.w3 = nn.Parameter(torch.empty(EXPERTS, C, C))
        for w in (self.w1, self.w2, self.w3):
            nn.init.normal_(w, std=0.1)
        self.num_activated_experts = num_activated_experts

    def forward(self, x):
        flat = x.view(-1, C)
        scores = F.softmax(self.gate(flat), dim=-1)
        expert_weights, expert_indices = torch.topk(scores, self.num_activated_experts, dim=-1)
        expert_weights /= expert_weights.sum(dim=-1, keepdim=True)
        x1 = F.silu(torch.einsum("ti,taoi -> tao", flat, self.w1[expert_indices]))
        x3 = torch.einsum("ti,taoi -> tao", flat, self.w3[expert_indices])
        outs = torch.einsum("tao,taio -> tai", x1 * x3, self.w2[expert_indices])
        return torch.einsum("tai,ta -> ti", outs, expert_weights).view(x.shape)


@layer(
    "routing by top k",
    "words sorted by expert and split by counts in a list",
    "davidmrau/mixture-of-experts, moe.py",
)
class SplitByCounts(nn.Module):
    def __init__(self, k=2):
        super().__init__()
        self.k = k
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        self.w_gate = nn.Parameter(torch.randn(C, EXPERTS) * 0.1)

    def forward(self, x):
        inp = x.flatten(0, 1)
        logits = inp @ self.w_gate
        top_logits, top_indices = logits.topk(self.k, dim=1)
        zeros = torch.zeros_like(logits)
        gates = zeros.scatter(1, top_indices, top_logits.softmax(1))
        sorted_experts, index_sorted = torch.nonzero(gates).sort(0)
        _, expert_index = sorted_experts.split(1, dim=1)
        batch_index = torch.nonzero(gates)[index_sorted[:, 1], 0]
        part_sizes = (gates > 0).sum(0).tolist()
        nonzero_gates = torch.gather(gates[batch_index], 1, expert_index)
        expert_inputs = torch.split(inp[batch_index], part_sizes, dim=0)
        outputs = [self.experts[i](expert_inputs[i]) for i in range(EXPERTS)]
        stitched = torch.cat(outputs, 0).mul(nonzero_gates)
        combined = torch.zeros(gates.size(0), C, device=x.device)
        return combined.index_add(0, batch_index, stitched).view_as(x)


@layer(
    "routing by top k",
    "words repeated for every expert and a batched product",
    "huggingface/transformers, models/llama4/modeling_llama4.py",
)
class RepeatedWords(nn.Module):
    def __init__(self, top_k=1):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(C, EXPERTS, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, C, 2 * C) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, C, C) * 0.1)
        self.shared_expert = Expert()

    def forward(self, hidden_states):
        shape = hidden_states.shape
        hidden_states = hidden_states.reshape(-1, C)
        router_logits = self.router(hidden_states)
        top_value, top_indices = torch.topk(router_logits, self.top_k, dim=1)
        scores = torch.full_like(router_logits, float("-inf"))
        scores = scores.scatter_(1, top_indices, top_value).transpose(0, 1)
        scores = torch.sigmoid(scores.float()).to(hidden_states.dtype)
        routed_in = hidden_states.repeat(EXPERTS, 1) * scores.reshape(-1, 1)
        gate_up = torch.bmm(routed_in.view(EXPERTS, -1, C), self.gate_up_proj)
        gate, up = gate_up.chunk(2, dim=-1)
        routed_out = torch.bmm(up * F.silu(gate), self.down_proj)
        out = self.shared_expert(hidden_states)
        out.add_(routed_out.reshape(EXPERTS, -1, C).sum(dim=0))
        return out.view(shape)


def cumsum_exclusive(t, dim=-1):
    num_pad_dims = -dim - 1
    pre_padding = (0, 0) * num_pad_dims
    pre_slice = (slice(None),) * num_pad_dims
    padded = F.pad(t, (*pre_padding, 1, 0)).cumsum(dim=dim)
    return padded[(..., slice(None, -1), *pre_slice)]


def safe_one_hot(indexes, max_length):
    max_index = indexes.max() + 1
    return F.one_hot(indexes, max(max_index + 1, max_length))[..., :max_length]


@layer(
    "routing with capacity",
    "places by exclusive cumsum and a one-hot dispatch einsum",
    "lucidrains/mixture-of-experts, mixture_of_experts/mixture_of_experts.py",
)
class DispatchEinsum(nn.Module):
    def __init__(self, capacity_factor=1.25):
        super().__init__()
        self.capacity_factor = capacity_factor
        self.w_gating = nn.Parameter(torch.randn(C, EXPERTS) * 0.1)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, C, C) / C**0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, C, C) / C**0.5)

    def forward(self, x):
        *_, group_size, _ = x.shape
        raw_gates = torch.einsum("bnd,de->bne", x, self.w_gating).softmax(dim=-1)
        gate_1, index_1 = raw_gates.topk(k=1, dim=-1)
        gate_1, index_1 = gate_1.squeeze(-1), index_1.squeeze(-1)
        mask_1 = F.one_hot(index_1, EXPERTS).float()
        capacity = max(int((group_size * self.capacity_factor) / EXPERTS), 4)
        position = cumsum_exclusive(mask_1, dim=-2) * mask_1
        mask_1 = mask_1 * (position < float(capacity)).float()
        mask_1_flat = mask_1.sum(dim=-1)
        position = position.sum(dim=-1)
        gate_1 = gate_1 * mask_1_flat
        combine_tensor = (
            gate_1[..., None, None]
            * mask_1_flat[..., None, None]
            * F.one_hot(index_1, EXPERTS)[..., None]
            * safe_one_hot(position.long(), capacity)[..., None, :]
        )
        dispatch_tensor = combine_tensor.bool().to(combine_tensor)
        expert_inputs = torch.einsum("bnd,bnec->ebcd", x, dispatch_tensor)
        hidden = F.gelu(torch.einsum("ebcd,edh->ebch", expert_inputs, self.w1))
        expert_outputs = torch.einsum("ebch,ehd->ebcd", hidden, self.w2)
        return torch.einsum("ebcd,bnec->bnd", expert_outputs, combine_tensor)


@layer(
    "routing with capacity",
    "cumsum of one-hot cut by a mask and written back by index",
    "huggingface/transformers, models/switch_transformers/modeling_switch_transformers.py",
)
class SwitchRouter(nn.Module):
    def __init__(self, expert_capacity=5):
        super().__init__()
        self.expert_capacity = expert_capacity
        self.classifier = nn.Linear(C, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({f"expert_{i}": Expert() for i in range(EXPERTS)})

    def forward(self, hidden_states):
        router_probs = F.softmax(self.classifier(hidden_states), dim=-1, dtype=torch.float32)
        expert_index = F.one_hot(torch.argmax(router_probs, dim=-1), num_classes=EXPERTS)
        token_priority = torch.cumsum(expert_index, dim=-2)
        expert_index = expert_index * (token_priority <= self.expert_capacity)
        router_probs = torch.max(router_probs, dim=-1).values.unsqueeze(-1)
        next_states = hidden_states.clone()
        for idx, expert in enumerate(self.experts.values()):
            token_indices = expert_index[:, :, idx].bool()
            next_states[token_indices] = expert(hidden_states[token_indices])
        return router_probs * next_states


@layer(
    "routing with capacity",
    "each expert takes the best words of the whole batch",
    "brineylab/BALM, balm/router.py",
)
class ExpertChoice(nn.Module):
    def __init__(self, capacity_factor=1.5):
        super().__init__()
        self.linear = nn.Linear(C, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        self.capacity_factor = capacity_factor

    def forward(self, x):
        x_flat = x.reshape(-1, x.shape[-1])
        capacity = int(x_flat.shape[0] * self.capacity_factor / EXPERTS)
        probs = self.linear(x_flat).softmax(dim=-1)
        expert_probs, expert_indices = torch.topk(probs.t(), k=capacity, dim=-1)
        output = x_flat.new_zeros(x_flat.shape)
        for expert, p, index in zip(self.experts, expert_probs, expert_indices, strict=True):
            chosen = expert(x_flat.index_select(0, index)) * p.unsqueeze(-1)
            output = output.scatter_add(0, index.unsqueeze(-1).expand(-1, x.shape[-1]), chosen)
        return output.view_as(x)


@layer(
    "routing with capacity",
    "routing map of the best gates of each expert",
    "NVIDIA/Megatron-LM, megatron/core/transformer/moe/moe_utils.py, topk_softmax_with_capacity",
)
class CapacityMap(nn.Module):
    def __init__(self, topk=2, capacity_factor=1.0):
        super().__init__()
        self.topk, self.capacity_factor = topk, capacity_factor
        self.weight = nn.Parameter(torch.empty(EXPERTS, C))
        nn.init.xavier_uniform_(self.weight)
        self.local_experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, hidden):
        x = hidden.view(-1, hidden.shape[-1])
        logits = F.linear(x, self.weight)
        num_tokens = logits.shape[0]
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32).type_as(logits)
        probs, top_indices = torch.topk(scores, self.topk, dim=1)
        masked_gates = torch.zeros_like(logits).scatter(1, top_indices, probs)
        topk_map = torch.zeros_like(logits).int().scatter(1, top_indices, 1).bool()
        capacity = math.ceil(num_tokens * self.topk / EXPERTS * self.capacity_factor)
        _, capacity_indices = torch.topk(masked_gates, k=capacity, dim=0, sorted=False)
        capacity_mask = torch.zeros_like(logits).scatter(0, capacity_indices, 1).bool()
        final_map = torch.logical_and(topk_map, capacity_mask)
        final_probs = masked_gates * final_map
        sorted_indices = final_map.T.int().argsort(dim=-1, descending=True, stable=True)
        sorted_indices = sorted_indices[:, :capacity].contiguous().view(-1)
        permuted_probs = final_probs.T.gather(1, sorted_indices.view(EXPERTS, capacity))
        permuted = x.index_select(0, sorted_indices).view(EXPERTS, capacity, -1)
        pieces = [expert(part) for expert, part in zip(self.local_experts, permuted, strict=True)]
        weighed = (torch.stack(pieces) * permuted_probs.unsqueeze(-1)).view(-1, x.shape[-1])
        output = torch.zeros_like(x)
        output.scatter_add_(0, sorted_indices.unsqueeze(1).expand(-1, x.shape[-1]), weighed)
        return output.view_as(hidden)


@model(
    "routing with capacity",
    "fixed hash of the word with the first of each expert kept",
    "facebookresearch/ParlAI, projects/params_vs_compute/hash_ladder",
)
class HashLayers(nn.Module):
    def __init__(self, capacity=40):
        super().__init__()
        self.capacity = capacity
        self.embed = nn.Embedding(V, C)
        self.body = Body()
        self.hash_bin_map = torch.randint(
            0, EXPERTS, (V,), generator=torch.Generator().manual_seed(42)
        )
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        self.norm, self.out = nn.LayerNorm(C), nn.Linear(C, V)

    def routed(self, x, xhs):
        shape = x.size()
        x, xhs = x.reshape(-1, shape[-1]), xhs.reshape(-1)
        result = torch.zeros_like(x)
        for i in range(EXPERTS):
            index = torch.nonzero(xhs == i).squeeze(-1)[: self.capacity]
            if index.numel() == 0:
                continue
            result[index] = self.experts[i](x[index])
        return result.view(shape)

    def forward(self, tokens, labels):
        xhs = self.hash_bin_map.to(tokens.device)[tokens]
        x = self.body(self.embed(tokens))
        x = x + self.routed(self.norm(x), xhs)
        return F.cross_entropy(self.out(x).view(-1, V), labels.view(-1))


@layer(
    "soft selection",
    "gumbel softmax over a codebook",
    "lucidrains/DALLE-pytorch, dalle_pytorch/dalle_pytorch.py",
)
class GumbelCodes(nn.Module):
    def __init__(self, num_tokens=24, temperature=0.9, straight_through=False):
        super().__init__()
        self.temperature, self.straight_through = temperature, straight_through
        self.to_logits = nn.Conv1d(C, num_tokens, 1)
        self.codebook = nn.Embedding(num_tokens, C)

    def forward(self, x):
        logits = self.to_logits(x.transpose(1, 2))
        soft_one_hot = F.gumbel_softmax(
            logits, tau=self.temperature, dim=1, hard=self.straight_through
        )
        return torch.einsum("b n s, n d -> b s d", soft_one_hot, self.codebook.weight)


@layer(
    "soft selection",
    "argmax scattered to one-hot with the gradient of softmax",
    "pytorch/pytorch, torch/nn/functional.py, gumbel_softmax with hard",
)
class StraightThrough(nn.Module):
    def __init__(self, choices=6):
        super().__init__()
        self.score = nn.Linear(C, choices)
        self.values = nn.Linear(C, C * choices)

    def forward(self, x):
        logits = self.score(x)
        y_soft = logits.softmax(-1)
        index = y_soft.max(-1, keepdim=True)[1]
        y_hard = torch.zeros_like(logits).scatter_(-1, index, 1.0)
        ret = y_hard - y_soft.detach() + y_soft
        values = self.values(x).unflatten(-1, (C, -1))
        return (values @ ret.unsqueeze(-1)).squeeze(-1)


@model("soft selection", "mixture of softmaxes over the words", "zihangdai/mos, model.py")
class MixtureOfSoftmaxes(nn.Module):
    def __init__(self, n_experts=3):
        super().__init__()
        self.n_experts, self.ntoken, self.ninp = n_experts, V, C
        self.encoder = nn.Embedding(V, C)
        self.rnn = Body()
        self.prior = nn.Linear(C, n_experts, bias=False)
        self.latent = nn.Sequential(nn.Linear(C, n_experts * C), nn.Tanh())
        self.decoder = nn.Linear(C, V)
        self.decoder.weight = self.encoder.weight
        self.init_weights()

    def init_weights(self):
        initrange = 0.1
        self.encoder.weight.data.uniform_(-initrange, initrange)
        self.decoder.bias.data.fill_(0)

    def forward(self, tokens, labels):
        output = self.rnn(self.encoder(tokens))
        latent = self.latent(output)
        logit = self.decoder(latent.view(-1, self.ninp))
        prior_logit = self.prior(output).contiguous().view(-1, self.n_experts)
        prior = nn.functional.softmax(prior_logit, -1)
        prob = F.softmax(logit.view(-1, self.ntoken), -1).view(-1, self.n_experts, self.ntoken)
        prob = (prob * prior.unsqueeze(2).expand_as(prob)).sum(1)
        log_prob = torch.log(prob.add_(1e-8))
        return F.nll_loss(log_prob, labels.view(-1))


@layer(
    "soft selection",
    "attention over slots repeated with a gru cell",
    "lucidrains/slot-attention, slot_attention/slot_attention.py",
)
class Slots(nn.Module):
    def __init__(self, num_slots=4, dim=C, iters=3, eps=1e-8):
        super().__init__()
        self.num_slots, self.iters, self.eps, self.scale = num_slots, iters, eps, dim**-0.5
        self.slots_mu = nn.Parameter(torch.randn(1, 1, dim))
        self.slots_logsigma = nn.Parameter(torch.zeros(1, 1, dim))
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.gru = nn.GRUCell(dim, dim)
        self.norm_input, self.norm_slots = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, inputs):
        b, _, d = inputs.shape
        mu = self.slots_mu.expand(b, self.num_slots, -1)
        sigma = self.slots_logsigma.exp().expand(b, self.num_slots, -1)
        slots = mu + sigma * torch.randn(mu.shape, device=inputs.device, dtype=inputs.dtype)
        inputs = self.norm_input(inputs)
        k, v = self.to_k(inputs), self.to_v(inputs)
        for _ in range(self.iters):
            slots_prev = slots
            q = self.to_q(self.norm_slots(slots))
            dots = torch.einsum("bid,bjd->bij", q, k) * self.scale
            seen = dots.softmax(dim=1) + self.eps
            attn = seen / seen.sum(dim=-1, keepdim=True)
            updates = torch.einsum("bjd,bij->bid", v, attn)
            slots = self.gru(updates.reshape(-1, d), slots_prev.reshape(-1, d))
            slots = slots.reshape(b, -1, d)
        return seen.transpose(1, 2) @ slots


@layer(
    "soft selection",
    "hard concrete gates stretched and clamped",
    "AMLab-Amsterdam/L0_regularization, l0_layers.py",
)
class HardConcrete(nn.Module):
    limit_a, limit_b, epsilon = -0.1, 1.1, 1e-6

    def __init__(self, in_features=C, out_features=C, droprate_init=0.5, temperature=2.0 / 3.0):
        super().__init__()
        self.temperature = temperature
        self.in_features = in_features
        self.weights = nn.Parameter(torch.Tensor(in_features, out_features))
        self.qz_loga = nn.Parameter(torch.Tensor(in_features))
        nn.init.kaiming_normal_(self.weights, mode="fan_out")
        mean = math.log(1 - droprate_init) - math.log(droprate_init)
        self.qz_loga.data.normal_(mean, 1e-2)

    def get_eps(self, size):
        return torch.empty(size, device=self.qz_loga.device).uniform_(
            self.epsilon, 1 - self.epsilon
        )

    def quantile_concrete(self, x):
        y = torch.sigmoid((torch.log(x) - torch.log(1 - x) + self.qz_loga) / self.temperature)
        return y * (self.limit_b - self.limit_a) + self.limit_a

    def forward(self, x):
        if self.training:
            z = self.quantile_concrete(self.get_eps((x.size(0), 1, self.in_features)))
        else:
            z = torch.sigmoid(self.qz_loga) * (self.limit_b - self.limit_a) + self.limit_a
        return x.mul(F.hardtanh(z, min_val=0, max_val=1)) @ self.weights
