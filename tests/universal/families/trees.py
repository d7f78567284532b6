"""The tree of each small model, by NumPy alone: what the layouts have to make.

    tree = trees.of(model, tensors)

Every tensor is used once.
"""

import numpy as np


def of(model, tensors):
    """The leaves of a model's tree by their names.

    Args:
      model: one of `models.MODELS`.
      tensors: by Hugging Face's names.
    """
    maker = _Maker(tensors, model.config.get("text_config", model.config))
    _TREES[model.architecture](maker)
    left = [name for name in tensors if name not in maker.used]
    assert not left, left
    return {path: np.ascontiguousarray(leaf) for path, leaf in maker.tree.items()}


class _Maker:
    def __init__(self, tensors, config):
        self._tensors = tensors
        self.config = config
        self.tree = {}
        self.used = set()
        self.source = self.target = ""

    def at(self, source, target):
        """Names begin with these from now on."""
        self.source, self.target = source, target
        return self

    def has(self, name):
        return self.source + name in self._tensors

    def take(self, name):
        name = self.source + name
        assert name not in self.used
        self.used.add(name)
        return self._tensors[name]

    def put(self, path, leaf):
        path = self.target + path
        assert path not in self.tree
        self.tree[path] = leaf

    def same(self, path, name):
        self.put(path, self.take(name))

    def turned(self, path, name):
        self.put(path, self.take(name).T)

    def norm(self, path, name):
        for leaf, of in (("scale", "weight"), ("bias", "bias")):
            if self.has(f"{name}.{of}"):
                self.same(f"{path}/{leaf}", f"{name}.{of}")

    def to_heads(self, path, values, heads):
        """A matrix to heads, or a bias."""
        rows = values.reshape(heads, -1, *values.shape[1:])
        self.put(path, rows.transpose(2, 0, 1) if rows.ndim == 3 else rows)

    def from_heads(self, path, name, heads):
        values = self.take(name)
        self.put(path, values.T.reshape(heads, -1, values.shape[0]))

    def experts(self, path, name):
        numbers = range(self.config.get("num_experts", 0) or 100)
        names = [name.format(number) for number in numbers]
        self.put(path, np.stack([self.take(n).T for n in names if self.has(n)]))


def _layers(make):
    for layer in range(make.config["num_hidden_layers"]):
        yield make.at(f"model.layers.{layer}.", f"layers/{layer}/")
    make.at("", "")
    make.same("embed/embedding", "model.embed_tokens.weight")
    make.norm("final_norm", "model.norm")
    tied = make.config["tie_word_embeddings"]
    assert tied is not make.has("lm_head.weight")
    if not tied:
        make.turned("head/kernel", "lm_head.weight")


def _attention(make):
    heads, kv = (
        make.config[f"num_{each}_heads"] for each in ("attention", "key_value")
    )
    for part, count in {"query": heads, "key": kv, "value": kv}.items():
        for leaf, of in {"kernel": "weight", "bias": "bias"}.items():
            name = f"self_attn.{part[0]}_proj.{of}"
            if make.has(name):
                make.to_heads(f"attention/{part}/{leaf}", make.take(name), count)
    make.from_heads("attention/out/kernel", "self_attn.o_proj.weight", heads)


def _head_norms(make):
    make.norm("attention/query_norm", "self_attn.q_norm")
    make.norm("attention/key_norm", "self_attn.k_norm")


def _mlp(make, source="mlp.", target="mlp/"):
    for part in ("gate", "up", "down"):
        make.turned(f"{target}{part}/kernel", f"{source}{part}_proj.weight")


def _experts(make):
    make.turned("moe/router/kernel", "mlp.gate.weight")
    for part in ("gate", "up", "down"):
        make.experts(f"moe/{part}/kernel", f"mlp.experts.{{}}.{part}_proj.weight")


def _llama(make):
    for layer in _layers(make):
        layer.norm("attention_norm", "input_layernorm")
        layer.norm("mlp_norm", "post_attention_layernorm")
        _attention(layer)
        _mlp(layer)


def _qwen(make):
    for layer in _layers(make):
        layer.norm("attention_norm", "input_layernorm")
        layer.norm("mlp_norm", "post_attention_layernorm")
        _attention(layer)
        _head_norms(layer)
        _experts(layer) if layer.has("mlp.gate.weight") else _mlp(layer)


def _mixtral(make):
    for layer in _layers(make):
        layer.norm("attention_norm", "input_layernorm")
        layer.norm("mlp_norm", "post_attention_layernorm")
        _attention(layer)
        layer.turned("moe/router/kernel", "block_sparse_moe.gate.weight")
        for part, name in {"gate": "w1", "down": "w2", "up": "w3"}.items():
            source = f"block_sparse_moe.experts.{{}}.{name}.weight"
            layer.experts(f"moe/{part}/kernel", source)


def _gemma(make):
    for layer in _layers(make):
        layer.norm("attention_norm", "input_layernorm")
        layer.norm("post_attention_norm", "post_attention_layernorm")
        layer.norm("mlp_norm", "pre_feedforward_layernorm")
        layer.norm("post_mlp_norm", "post_feedforward_layernorm")
        _attention(layer)
        _head_norms(layer)
        _mlp(layer)


def _olmo(make):
    heads, kv = (
        make.config[f"num_{each}_heads"] for each in ("attention", "key_value")
    )
    for layer in _layers(make):
        layer.norm("post_attention_norm", "post_attention_layernorm")
        layer.norm("post_mlp_norm", "post_feedforward_layernorm")
        _attention(layer)
        for part, count in {"query": heads, "key": kv}.items():
            values = layer.take(f"self_attn.{part[0]}_norm.weight")
            layer.to_heads(f"attention/{part}_norm/scale", values, count)
        _mlp(layer)


def _phi(make):
    heads, kv = (
        make.config[f"num_{each}_heads"] for each in ("attention", "key_value")
    )
    d, ff = make.config["head_dim"], make.config["intermediate_size"]
    for layer in _layers(make):
        layer.norm("attention_norm", "input_layernorm")
        layer.norm("mlp_norm", "post_attention_layernorm")
        fused = layer.take("self_attn.qkv_proj.weight")
        parts = np.split(fused, [heads * d, (heads + kv) * d])
        for part, count, values in zip(
            ("query", "key", "value"), (heads, kv, kv), parts, strict=True
        ):
            layer.to_heads(f"attention/{part}/kernel", values, count)
        layer.from_heads("attention/out/kernel", "self_attn.o_proj.weight", heads)
        fused = layer.take("mlp.gate_up_proj.weight")
        layer.put("mlp/gate/kernel", fused[:ff].T)
        layer.put("mlp/up/kernel", fused[ff:].T)
        layer.turned("mlp/down/kernel", "mlp.down_proj.weight")


def _llama4(make):
    for layer in _layers(make):
        layer.norm("attention_norm", "input_layernorm")
        layer.norm("mlp_norm", "post_attention_layernorm")
        _attention(layer)
        if not layer.has("feed_forward.router.weight"):
            _mlp(layer, "feed_forward.")
            continue
        layer.turned("moe/router/kernel", "feed_forward.router.weight")
        fused = layer.take("feed_forward.experts.gate_up_proj")
        gate, up = np.split(fused, 2, axis=2)
        layer.put("moe/gate/kernel", gate)
        layer.put("moe/up/kernel", up)
        layer.same("moe/down/kernel", "feed_forward.experts.down_proj")
        _mlp(layer, "feed_forward.shared_expert.", "moe/shared/")


def _gpt_oss(make):
    for layer in _layers(make):
        layer.norm("attention_norm", "input_layernorm")
        layer.norm("mlp_norm", "post_attention_layernorm")
        _attention(layer)
        layer.same("attention/out/bias", "self_attn.o_proj.bias")
        layer.same("attention/sinks", "self_attn.sinks")
        layer.turned("moe/router/kernel", "mlp.router.weight")
        layer.same("moe/router/bias", "mlp.router.bias")
        for leaf, suffix in {"kernel": "", "bias": "_bias"}.items():
            fused = layer.take(f"mlp.experts.gate_up_proj{suffix}")
            layer.put(f"moe/gate/{leaf}", fused[..., ::2])
            layer.put(f"moe/up/{leaf}", fused[..., 1::2])
            layer.same(f"moe/down/{leaf}", f"mlp.experts.down_proj{suffix}")


def _deepseek(make):
    heads, rank = make.config["num_attention_heads"], make.config["kv_lora_rank"]
    nope = make.config["qk_nope_head_dim"]
    for layer in _layers(make):
        layer.norm("attention_norm", "input_layernorm")
        layer.norm("mlp_norm", "post_attention_layernorm")
        if layer.has("self_attn.q_proj.weight"):
            values = layer.take("self_attn.q_proj.weight")
            layer.to_heads("attention/query/kernel", values, heads)
        else:
            layer.turned("attention/query_down/kernel", "self_attn.q_a_proj.weight")
            layer.norm("attention/query_down_norm", "self_attn.q_a_layernorm")
            values = layer.take("self_attn.q_b_proj.weight")
            layer.to_heads("attention/query_up/kernel", values, heads)
        fused = layer.take("self_attn.kv_a_proj_with_mqa.weight")
        layer.put("attention/kv_down/kernel", fused[:rank].T)
        layer.put("attention/key_rope/kernel", fused[rank:].T)
        layer.norm("attention/kv_down_norm", "self_attn.kv_a_layernorm")
        fused = layer.take("self_attn.kv_b_proj.weight").reshape(heads, -1, rank)
        layer.put("attention/key_up/kernel", fused[:, :nope].transpose(2, 0, 1))
        layer.put("attention/value_up/kernel", fused[:, nope:].transpose(2, 0, 1))
        layer.from_heads("attention/out/kernel", "self_attn.o_proj.weight", heads)
        if not layer.has("mlp.gate.weight"):
            _mlp(layer)
            continue
        _experts(layer)
        if layer.has("mlp.gate.e_score_correction_bias"):
            name = "mlp.gate.e_score_correction_bias"
            layer.same("moe/router/correction_bias", name)
        _mlp(layer, "mlp.shared_experts.", "moe/shared/")


def _qwen_next(make):
    for layer in _layers(make):
        layer.norm("attention_norm", "input_layernorm")
        layer.norm("mlp_norm", "post_attention_layernorm")
        if layer.has("self_attn.q_proj.weight"):
            _gated_attention(layer)
        else:
            _linear_attention(layer)
        if not layer.has("mlp.gate.weight"):
            _mlp(layer)
            continue
        _experts(layer)
        _mlp(layer, "mlp.shared_expert.", "moe/shared/")
        layer.put(
            "moe/shared_gate/kernel", layer.take("mlp.shared_expert_gate.weight")[0]
        )


def _gated_attention(layer):
    heads, kv, d = (
        layer.config[each]
        for each in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    fused = layer.take("self_attn.q_proj.weight").reshape(heads, 2 * d, -1)
    layer.put("attention/query/kernel", fused[:, :d].transpose(2, 0, 1))
    layer.put("attention/gate/kernel", fused[:, d:].transpose(2, 0, 1))
    for part in ("key", "value"):
        values = layer.take(f"self_attn.{part[0]}_proj.weight")
        layer.to_heads(f"attention/{part}/kernel", values, kv)
    _head_norms(layer)
    layer.from_heads("attention/out/kernel", "self_attn.o_proj.weight", heads)


def _linear_attention(layer):
    keys, values, key_d, value_d = (
        layer.config[f"linear_{each}"]
        for each in (
            "num_key_heads",
            "num_value_heads",
            "key_head_dim",
            "value_head_dim",
        )
    )
    group = values // keys
    source, target = "linear_attn.", "linear_attention/"
    fused = layer.take(f"{source}in_proj_qkvz.weight")
    fused = fused.reshape(keys, -1, fused.shape[1])
    start = 0
    for part, heads, d, rows in (
        ("query", keys, key_d, key_d),
        ("key", keys, key_d, key_d),
        ("value", values, value_d, group * value_d),
        ("gate", values, value_d, group * value_d),
    ):
        of_part = fused[:, start : start + rows].reshape(heads, d, -1)
        layer.put(f"{target}{part}/kernel", of_part.transpose(2, 0, 1))
        start += rows
    fused = layer.take(f"{source}in_proj_ba.weight").reshape(keys, 2, group, -1)
    for number, part in enumerate(("beta", "decay")):
        of_part = fused[:, number].reshape(values, -1)
        layer.put(f"{target}{part}/kernel", of_part.T)
    fused = layer.take(f"{source}conv1d.weight")[:, 0].T
    for part, heads, d in (
        ("query", keys, key_d),
        ("key", keys, key_d),
        ("value", values, value_d),
    ):
        of_part, fused = fused[:, : heads * d], fused[:, heads * d :]
        layer.put(f"{target}{part}_conv/kernel", of_part.reshape(-1, heads, d))
    assert not fused.size
    layer.same(f"{target}decay/log", f"{source}A_log")
    layer.same(f"{target}decay/bias", f"{source}dt_bias")
    layer.norm(f"{target}norm", f"{source}norm")
    layer.from_heads(f"{target}out/kernel", f"{source}out_proj.weight", values)


def _gpt_neox(make):
    heads = make.config["num_attention_heads"]
    for number in range(make.config["num_hidden_layers"]):
        layer = make.at(f"gpt_neox.layers.{number}.", f"layers/{number}/")
        layer.norm("attention_norm", "input_layernorm")
        layer.norm("mlp_norm", "post_attention_layernorm")
        for leaf, of in {"kernel": "weight", "bias": "bias"}.items():
            fused = layer.take(f"attention.query_key_value.{of}")
            fused = fused.reshape(heads, 3, -1, *fused.shape[1:])
            for at, part in enumerate(("query", "key", "value")):
                values = fused[:, at].reshape(-1, *fused.shape[3:])
                layer.to_heads(f"attention/{part}/{leaf}", values, heads)
        layer.from_heads("attention/out/kernel", "attention.dense.weight", heads)
        layer.same("attention/out/bias", "attention.dense.bias")
        for part, name in {"up": "dense_h_to_4h", "down": "dense_4h_to_h"}.items():
            layer.turned(f"mlp/{part}/kernel", f"mlp.{name}.weight")
            layer.same(f"mlp/{part}/bias", f"mlp.{name}.bias")
    make.at("", "")
    make.same("embed/embedding", "gpt_neox.embed_in.weight")
    make.turned("head/kernel", "embed_out.weight")
    make.norm("final_norm", "gpt_neox.final_layer_norm")


def _gpt2(make):
    heads = make.config["n_head"]
    for number in range(make.config["n_layer"]):
        layer = make.at(f"transformer.h.{number}.", f"layers/{number}/")
        layer.norm("attention_norm", "ln_1")
        layer.norm("mlp_norm", "ln_2")
        for leaf, of in {"kernel": "weight", "bias": "bias"}.items():
            parts = np.split(layer.take(f"attn.c_attn.{of}"), 3, axis=-1)
            for part, values in zip(("query", "key", "value"), parts, strict=True):
                layer.to_heads(f"attention/{part}/{leaf}", values.T, heads)
        values = layer.take("attn.c_proj.weight")
        layer.put("attention/out/kernel", values.reshape(heads, -1, values.shape[1]))
        layer.same("attention/out/bias", "attn.c_proj.bias")
        for part, name in {"up": "c_fc", "down": "c_proj"}.items():
            layer.same(f"mlp/{part}/kernel", f"mlp.{name}.weight")
            layer.same(f"mlp/{part}/bias", f"mlp.{name}.bias")
    make.at("", "")
    make.same("embed/embedding", "transformer.wte.weight")
    make.same("positions/embedding", "transformer.wpe.weight")
    make.norm("final_norm", "transformer.ln_f")


def _t5(make):
    make.same("embed/embedding", "shared.weight")
    counts = {"encoder": "num_layers", "decoder": "num_decoder_layers"}
    heads = make.config["num_heads"]
    for stack, count in counts.items():
        for number in range(make.config[count]):
            layer = make.at(
                f"{stack}.block.{number}.layer.", f"{stack}/layers/{number}/"
            )
            parts = {"0.SelfAttention": "attention"}
            if stack == "decoder":
                parts["1.EncDecAttention"] = "cross_attention"
            for source, target in parts.items():
                for part in ("q", "k", "v"):
                    values = layer.take(f"{source}.{part}.weight")
                    layer.to_heads(f"{target}/{part}/kernel", values, heads)
                layer.from_heads(f"{target}/o/kernel", f"{source}.o.weight", heads)
                layer.norm(f"{target}_norm", f"{source[0]}.layer_norm")
            last = len(parts)
            for part in ("wi_0", "wi_1", "wo"):
                name = f"{last}.DenseReluDense.{part}.weight"
                layer.turned(f"mlp/{part}/kernel", name)
            layer.norm("mlp_norm", f"{last}.layer_norm")
        make.at(f"{stack}.", f"{stack}/")
        name = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        make.turned("position_bias", name)
        make.norm("final_norm", "final_layer_norm")


def _vit(make):
    heads = make.config["num_attention_heads"]
    for number in range(make.config["num_hidden_layers"]):
        layer = make.at(f"vit.encoder.layer.{number}.", f"layers/{number}/")
        layer.norm("before", "layernorm_before")
        layer.norm("after", "layernorm_after")
        for leaf, of in {"kernel": "weight", "bias": "bias"}.items():
            for part in ("query", "key", "value"):
                values = layer.take(f"attention.attention.{part}.{of}")
                layer.to_heads(f"attention/{part}/{leaf}", values, heads)
        layer.from_heads("attention/out/kernel", "attention.output.dense.weight", heads)
        layer.same("attention/out/bias", "attention.output.dense.bias")
        for part in ("intermediate", "output"):
            layer.turned(f"mlp/{part}/kernel", f"{part}.dense.weight")
            layer.same(f"mlp/{part}/bias", f"{part}.dense.bias")
    make.at("vit.embeddings.", "embed/")
    make.put("class", make.take("cls_token")[0, 0])
    make.put("positions", make.take("position_embeddings")[0])
    values = make.take("patch_embeddings.projection.weight")
    make.put("patches/kernel", values.transpose(2, 3, 1, 0))
    make.same("patches/bias", "patch_embeddings.projection.bias")
    make.at("", "")
    make.norm("final_norm", "vit.layernorm")
    make.turned("head/kernel", "classifier.weight")
    make.same("head/bias", "classifier.bias")


_TREES = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _llama,
    "Mistral3ForConditionalGeneration": _llama,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _qwen,
    "Qwen3ForCausalLM": _qwen,
    "Qwen3MoeForCausalLM": _qwen,
    "Qwen3NextForCausalLM": _qwen_next,
    "Gemma2ForCausalLM": _gemma,
    "Gemma3ForCausalLM": _gemma,
    "Gemma3ForConditionalGeneration": _gemma,
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
    "GptOssForCausalLM": _gpt_oss,
    "Olmo2ForCausalLM": _olmo,
    "Olmo3ForCausalLM": _olmo,
    "Phi3ForCausalLM": _phi,
    "Llama4ForCausalLM": _llama4,
    "Llama4ForConditionalGeneration": _llama4,
    "GPTNeoXForCausalLM": _gpt_neox,
    "GPT2LMHeadModel": _gpt2,
    "T5ForConditionalGeneration": _t5,
    "ViTForImageClassification": _vit,
}
