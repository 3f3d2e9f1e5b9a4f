"""Gated delta nets in plain torch, in place of the kernels that SGLang's path for CPUs calls.

Those kernels are in builds of ``sgl_kernel`` for CPUs, which no registry has, and need AMX. The
pools, schedulers and models are SGLang's own: these functions read and write the states in the
slots that SGLang names. A head's matrix lies with its keys first, as in the kernels.
"""

import torch
from torch.nn import functional

# T token, H head, K element of a key, V element of a value, C channel, W input of a convolution


def causal_conv1d_fn_cpu(
    x_CT,
    weight_CW,
    bias,
    *,
    activation,
    conv_states,
    has_initial_state,
    cache_indices,
    query_start_loc,
    seq_lens_cpu,
):
    """The convolution over some requests, one behind the other."""
    found = torch.empty_like(x_CT)
    ends = query_start_loc.tolist()
    for number, slot in enumerate(cache_indices.tolist()):
        span = slice(ends[number], ends[number + 1])
        state_CW = conv_states[slot]
        if not has_initial_state[number]:
            state_CW = torch.zeros_like(state_CW)
        inputs_CT = torch.cat([state_CW.to(x_CT.dtype), x_CT[:, span]], dim=1)
        made = functional.conv1d(inputs_CT[None], weight_CW[:, None], bias, groups=len(weight_CW))[
            0
        ]
        found[:, span] = functional.silu(made) if activation else made
        conv_states[slot] = inputs_CT[:, -state_CW.shape[1] :].to(conv_states.dtype)
    return found


def causal_conv1d_update_cpu(x_BC, conv_states, weight_CW, bias, activation, *, conv_state_indices):
    """The convolution of one token per request."""
    return causal_conv1d_fn_cpu(
        x_BC.transpose(0, 1),
        weight_CW,
        bias,
        activation=activation,
        conv_states=conv_states,
        has_initial_state=[True] * len(x_BC),
        cache_indices=conv_state_indices,
        query_start_loc=torch.arange(len(x_BC) + 1),
        seq_lens_cpu=None,
    ).transpose(0, 1)


def gates(A_log, a_TH, b_TH, dt_bias):
    """The logarithm of the decay, and the strength of the update: ``[1, T, H]``."""
    decay = -A_log.float().exp() * functional.softplus(a_TH.float() + dt_bias.float())
    return decay[None], b_TH.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    *, q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, **_
):
    """The delta rule over some requests, one behind the other; also writes their states."""
    q_THK, k_THK = (functional.normalize(each[0].float(), dim=-1, eps=1e-6) for each in (q, k))
    v_THV = v[0].float()
    heads, value = v_THV.shape[1:]
    repeats, size = heads // q_THK.shape[1], q_THK.shape[2]
    q_THK = q_THK.repeat_interleave(repeats, dim=1) * size**-0.5
    k_THK = k_THK.repeat_interleave(repeats, dim=1)
    decays_TH = g[0].exp()
    found_THV = torch.empty_like(v_THV)
    ends = cu_seqlens.tolist()
    for number, slot in enumerate(initial_state_indices.tolist()):
        state_HKV = initial_state[slot].view(heads, size, value).float()
        for token in range(ends[number], ends[number + 1]):
            k_HK = k_THK[token]
            state_HKV = state_HKV * decays_TH[token, :, None, None]
            known_HV = torch.einsum("hkv,hk->hv", state_HKV, k_HK)
            change_HV = (v_THV[token] - known_HV) * beta[0, token, :, None]
            state_HKV = state_HKV + k_HK[:, :, None] * change_HV[:, None]
            found_THV[token] = torch.einsum("hkv,hk->hv", state_HKV, q_THK[token])
        initial_state[slot] = state_HKV.view(initial_state[slot].shape)
    return found_THV[None].to(v.dtype), None, None


def delta_rule_update(
    A_log,
    dt_bias,
    q,
    k,
    v,
    a,
    b,
    initial_state_source,
    initial_state_indices,
    cu_seqlens,
    use_qk_l2norm_in_kernel,
    softplus_beta,
    softplus_threshold,
):
    """The delta rule of one token per request."""
    g, beta = gates(A_log, a, b, dt_bias)
    found, _, _ = chunk_gated_delta_rule_cpu(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
    )
    return found


def norm_gated(x, g, weight, bias, activation="swish", *, eps, **_):
    """A norm with a gate, which SGLang has for GPUs and for AMX."""
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    gate = g.float().sigmoid() if activation == "sigmoid" else functional.silu(g.float())
    return (x.float() * scale * weight.float() * gate.reshape(x.shape)).to(x.dtype)


def gate_shared_expert(x_TD, weight_D, shared_TD, output_TD):
    """Adds what a model's shared expert gives, which SGLang computes on GPUs and with AMX."""
    output_TD += (x_TD @ weight_D).sigmoid()[:, None] * shared_TD


_GATES = "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)"
_UPDATE = """(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b,
    Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens,
    bool use_qk_l2norm_in_kernel, float softplus_beta, float softplus_threshold) -> Tensor"""


def install():
    """Makes SGLang find the functions."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate
    from sglang.srt.models import qwen2_moe

    fused_norm_gate.rms_norm_gated = norm_gated
    qwen2_moe.fused_gate_sigmoid_mul_add = gate_shared_expert
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name, parameters, function in (
        ("fused_gdn_gating_cpu", _GATES, gates),
        ("fused_sigmoid_gating_delta_rule_update_cpu", _UPDATE, delta_rule_update),
    ):
        library.define(name + parameters)
        library.impl(name, function, "CompositeExplicitAutograd")
    return library
