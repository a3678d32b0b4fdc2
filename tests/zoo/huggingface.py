"""Table of architectures of transformers: config, model, inputs, and changes of `TINY`.

The sizes and options of `TINY` apply to configs that have attributes of these names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TINY = {
    "vocab_size": 96,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), 64),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers",
         "num_encoder_layers", "num_decoder_layers", "n_layers"), 1
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads",
         "decoder_attention_heads", "n_heads"), 4
    ),
    "num_key_value_heads": 2,
    "head_dim": 16,
    **dict.fromkeys(
        ("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner",
         "hidden_dim"), 128
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions",
                     "max_target_positions"), 64),
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 10,
    "use_cache": False,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    **dict.fromkeys(("router_jitter_noise", "input_jitter_noise"), 0.0),
}  # fmt: skip


DEFAULT = object()  # the default of the config instead of the value in TINY


def ids(rows: int = 2, length: int = 16) -> Tensor:
    return torch.randint(3, 96, (rows, length))


def mel(bins: int = 80, frames: int = 32) -> Callable[[], dict[str, Any]]:
    return lambda: {"input_features": torch.randn(2, bins, frames)}


def text() -> dict[str, Any]:
    return {"input_ids": ids()}


def labelled() -> dict[str, Any]:
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens}


def pairs() -> dict[str, Any]:
    return {"input_ids": ids(), "decoder_input_ids": ids(2, 8)}


def image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def large_image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 64, 64)}


def sound() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 1600)}


def both() -> dict[str, Any]:
    return {**text(), **image(), "attention_mask": torch.ones(2, 16, dtype=torch.long)}


@dataclass(frozen=True)
class HuggingFace:
    """An architecture.

    Attributes:
        config, model: names in transformers.
        inputs: makes a batch.
        changes: options of the config besides `TINY`. Parts of a composite config are nested.
    """

    config: str
    model: str
    inputs: Callable[[], Mapping[str, Any]]
    changes: Mapping[str, Any]

    def make(self) -> tuple[nn.Module, Mapping[str, Any]]:
        """Return the model, in fp32 and without dropout, and a batch."""
        import transformers

        torch.manual_seed(0)
        config = tiny(getattr(transformers, self.config), self.changes)
        model = getattr(transformers, self.model)(config)
        return without_dropout(model.train()), self.inputs()


def tiny(config: type, changes: Mapping[str, Any]) -> Any:
    """Return a small config of a class."""
    known = set(inspect.signature(config).parameters) | set(getattr(config, "attribute_map", {}))
    known |= {n for c in config.__mro__ for n in getattr(c, "__annotations__", {})}
    values = {**{k: v for k, v in TINY.items() if k in known}, **changes}
    return config(**{k: v for k, v in values.items() if v is not DEFAULT})


def without_dropout(model: nn.Module) -> nn.Module:
    """Disable all randomness of a model, so that runs can be compared."""
    for module in model.modules():
        if type(module).__name__ == "PhimoeTopKRouter":  # it draws experts at random
            module.eval()
        for name in ("dropout", "p", "layerdrop", "attention_dropout", "activation_dropout",
                     "dropout_prob", "attn_dropout", "drop_prob", "dropout_rate",
                     "hidden_dropout", "resid_dropout", "attention_dropout_prob",
                     "dropout_p", "is_decoder_dropout", "embd_pdrop",
                     "residual_dropout"):  # fmt: skip
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
        config = getattr(module, "config", None)
        for name in list(vars(config) if config is not None else ()):
            if "drop" in name and isinstance(getattr(config, name), float):
                setattr(config, name, 0.0)
    return model


def _of(model: str, inputs: Callable[[], Mapping[str, Any]], **changes: Any) -> HuggingFace:
    """Return an entry. By default the name of the config is derived from the name of the model."""
    stem = model.split("For")[0].removesuffix("Model").removesuffix("LMHead")
    config = changes.pop("config", f"{stem}Config")
    return HuggingFace(config, model, inputs, changes)


SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
VISION = {**SIZES, "intermediate_size": 128, "image_size": 32, "patch_size": 8}
TEXT = {**SIZES, "intermediate_size": 128, "vocab_size": 96, "max_position_embeddings": 64}
MLA = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
    "num_key_value_heads": 4, "head_dim": 16,
}  # fmt: skip
DEFAULTS = dict.fromkeys(
    ("hidden_size", "num_layers", "num_hidden_layers", "num_attention_heads", "patch_size"), DEFAULT
)
CONVOLUTIONS = {
    **DEFAULTS, "depths": (1, 1, 1, 1), "hidden_sizes": (16, 32, 48, 64),
    "layer_scale_init_value": 0.1,
}  # fmt: skip
SPEECH = {
    "conv_dim": (32, 32), "conv_kernel": (10, 8), "conv_stride": (5, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0,
    "apply_spec_augment": False,
}  # fmt: skip
SWIN = {
    **DEFAULTS, "depths": (1, 1), "num_heads": (2, 4), "embed_dim": 32, "window_size": 4,
    "patch_size": 4,
}  # fmt: skip

LANGUAGE = {
    "llama": _of("LlamaForCausalLM", labelled),
    "mistral": _of("MistralForCausalLM", labelled),
    "qwen2": _of("Qwen2ForCausalLM", labelled),
    "qwen3": _of("Qwen3ForCausalLM", labelled),
    "gemma2": _of("Gemma2ForCausalLM", labelled),
    "gemma3": _of("Gemma3ForCausalLM", labelled, config="Gemma3TextConfig"),
    "phi3": _of("Phi3ForCausalLM", labelled),
    "phi": _of("PhiForCausalLM", labelled),
    "gpt2": _of("GPT2LMHeadModel", labelled),
    "gpt neo": _of("GPTNeoForCausalLM", labelled, attention_types=[[["global"], 1]]),
    "gpt neox": _of("GPTNeoXForCausalLM", labelled),
    "gptj": _of("GPTJForCausalLM", labelled, rotary_dim=8),
    "gpt bigcode": _of("GPTBigCodeForCausalLM", labelled),
    "codegen": _of("CodeGenForCausalLM", labelled, rotary_dim=8),
    "opt": _of("OPTForCausalLM", labelled, word_embed_proj_dim=64),
    "bloom": _of("BloomForCausalLM", labelled),
    "mpt": _of("MptForCausalLM", labelled, max_seq_len=64, expansion_ratio=2),
    "falcon": _of("FalconForCausalLM", labelled),
    "cohere": _of("CohereForCausalLM", labelled),
    "olmo2": _of("Olmo2ForCausalLM", labelled),
    "stablelm": _of("StableLmForCausalLM", labelled),
    "starcoder2": _of("Starcoder2ForCausalLM", labelled),
    "glm": _of("GlmForCausalLM", labelled),
    "granite": _of("GraniteForCausalLM", labelled),
    "nemotron": _of("NemotronForCausalLM", labelled),
    "persimmon": _of("PersimmonForCausalLM", labelled),
    "smollm3": _of("SmolLM3ForCausalLM", labelled),
    "diffllama": _of("DiffLlamaForCausalLM", labelled),
    "exaone4": _of("Exaone4ForCausalLM", labelled),
    "helium": _of("HeliumForCausalLM", labelled),
    "xglm": _of("XGLMForCausalLM", labelled, attention_heads=4),
    "gemma": _of("GemmaForCausalLM", labelled),
    "cohere2": _of("Cohere2ForCausalLM", labelled),
    "glm4": _of("Glm4ForCausalLM", labelled),
    "ernie 4.5": _of("Ernie4_5ForCausalLM", labelled),
    "hunyuan": _of("HunYuanDenseV1ForCausalLM", labelled),
    "apertus": _of("ApertusForCausalLM", labelled),
    "arcee": _of("ArceeForCausalLM", labelled),
    "bitnet": _of("BitNetForCausalLM", labelled),
    "hrm text": _of("HrmTextForCausalLM", labelled),
    "bart, decoder": _of("BartForCausalLM", labelled, config="BartConfig"),
    "biogpt": _of("BioGptForCausalLM", labelled),
    "ctrl": _of("CTRLLMHeadModel", labelled, config="CTRLConfig"),
    "cpmant": _of("CpmAntForCausalLM", labelled),
    "olmo3": _of("Olmo3ForCausalLM", labelled),
    "seed oss": _of("SeedOssForCausalLM", labelled),
    "nemotron h": _of("NemotronHForCausalLM", labelled),
    "minicpm3": _of("MiniCPM3ForCausalLM", labelled, **MLA),
    "youtu": _of("YoutuForCausalLM", labelled, **MLA),
    "bert": _of("BertForMaskedLM", labelled),
    "roberta": _of("RobertaForMaskedLM", labelled),
    "albert": _of("AlbertForMaskedLM", labelled),
    "electra": _of("ElectraForMaskedLM", labelled),
    "distilbert": _of("DistilBertForMaskedLM", labelled),
    "deberta v2": _of("DebertaV2ForMaskedLM", labelled, relative_attention=True,
                      pos_att_type=["p2c", "c2p"], position_biased_input=False),
    "mpnet": _of("MPNetForMaskedLM", labelled),
    "roformer": _of("RoFormerForMaskedLM", labelled, config="RoFormerConfig"),
    "squeezebert": _of("SqueezeBertForMaskedLM", labelled),
    "fnet": _of("FNetForMaskedLM", labelled),
    "convbert": _of("ConvBertForMaskedLM", labelled),
    "modernbert": _of("ModernBertForMaskedLM", labelled),
    "xlnet": _of("XLNetLMHeadModel", labelled, d_inner=128),
}  # fmt: skip

EXPERTS = {
    "mixtral": _of("MixtralForCausalLM", labelled),
    "qwen2 moe": _of("Qwen2MoeForCausalLM", labelled, shared_expert_intermediate_size=32),
    "qwen3 moe": _of("Qwen3MoeForCausalLM", labelled),
    "olmoe": _of("OlmoeForCausalLM", labelled),
    # Experts that tie with the best expert get gradients. Ties occur in BF16 but not in FP64.
    "phimoe": _of("PhimoeForCausalLM", labelled, router_jitter_noise=10.0),
    "granite moe": _of("GraniteMoeForCausalLM", labelled),
    "glm4 moe": _of("Glm4MoeForCausalLM", labelled),
    "ernie 4.5 moe": _of("Ernie4_5_MoeForCausalLM", labelled),
    "hunyuan moe": _of("HunYuanMoEV1ForCausalLM", labelled),
    "deepseek v4": _of("DeepseekV4ForCausalLM", labelled),
    "exaone moe": _of("ExaoneMoeForCausalLM", labelled),
    "doge": _of("DogeForCausalLM", labelled),
    "jetmoe": _of("JetMoeForCausalLM", labelled),
    "minimax": _of("MiniMaxForCausalLM", labelled),
    "minimax m2": _of("MiniMaxM2ForCausalLM", labelled),
    "qwen3.5 moe": _of("Qwen3_5MoeForCausalLM", labelled, config="Qwen3_5MoeTextConfig"),
    "deepseek v3.2": _of("DeepseekV32ForCausalLM", labelled, **MLA),
    "glm moe dsa": _of("GlmMoeDsaForCausalLM", labelled, **MLA),
    "longcat flash": _of("LongcatFlashForCausalLM", labelled, **MLA),
    "llama4": _of("Llama4ForCausalLM", labelled, config="Llama4TextConfig",
                  intermediate_size_mlp=128, attention_chunk_size=16, num_experts_per_tok=1),
    "gpt oss": _of("GptOssForCausalLM", labelled),
    "deepseek v2": _of("DeepseekV2ForCausalLM", labelled, **MLA),
    "deepseek v3": _of("DeepseekV3ForCausalLM", labelled, **MLA),
    "switch transformers": _of("SwitchTransformersForConditionalGeneration", pairs, d_kv=16,
                               num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
}  # fmt: skip

STATE_SPACE = {
    "mamba": _of("MambaForCausalLM", labelled, state_size=8, time_step_rank=4),
    "mamba2": _of("Mamba2ForCausalLM", labelled, state_size=16, num_heads=8, head_dim=16,
                  n_groups=1, chunk_size=8),
    "falcon mamba": _of("FalconMambaForCausalLM", labelled, state_size=8, time_step_rank=4),
    "recurrent gemma": _of("RecurrentGemmaForCausalLM", labelled, lru_width=64,
                           num_hidden_layers=3, attention_window_size=16),
    "bamba": _of("BambaForCausalLM", labelled, mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1,
                 mamba_d_state=16, mamba_chunk_size=8, num_hidden_layers=2,
                 attn_layer_indices=[1]),
    "qwen3 next": _of("Qwen3NextForCausalLM", labelled, layer_types=["linear_attention"],
                      linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
                      linear_value_head_dim=16, shared_expert_intermediate_size=32),
    "kimi linear": _of("KimiLinearForCausalLM", labelled),
    "falcon h1": _of("FalconH1ForCausalLM", labelled),
    "jamba": _of("JambaForCausalLM", labelled),
    "granite moe hybrid": _of("GraniteMoeHybridForCausalLM", labelled),
    "lfm2": _of("Lfm2ForCausalLM", labelled),
    "olmo hybrid": _of("OlmoHybridForCausalLM", labelled, num_hidden_layers=2,
                       layer_types=["linear_attention", "full_attention"],
                       num_key_value_heads=4),
    "rwkv": _of("RwkvForCausalLM", labelled, num_hidden_layers=2, attention_hidden_size=64),
    "zamba2": _of("Zamba2ForCausalLM", labelled, num_hidden_layers=2,
                  layer_types=["linear_attention", "hybrid"], hybrid_layer_ids=[1]),
}  # fmt: skip

ENCODER_DECODER = {
    "t5": _of("T5ForConditionalGeneration", pairs, d_kv=16),
    "flan t5": _of("T5ForConditionalGeneration", pairs, d_kv=16, feed_forward_proj="gated-gelu"),
    "umt5": _of("UMT5ForConditionalGeneration", pairs, d_kv=16),
    "bart": _of("BartForConditionalGeneration", pairs),
    "pegasus": _of("PegasusForConditionalGeneration", pairs),
    "m2m100": _of("M2M100ForConditionalGeneration", pairs),
    "blenderbot small": _of("BlenderbotSmallForConditionalGeneration", pairs),
    "prophetnet": _of("ProphetNetForConditionalGeneration", pairs, num_encoder_attention_heads=4,
                      num_decoder_attention_heads=4),
    "fsmt": _of("FSMTForConditionalGeneration", pairs, langs=["en", "de"], src_vocab_size=96,
                tgt_vocab_size=96),
}  # fmt: skip

VISION_MODELS = {
    "vit": _of("ViTForImageClassification", image),
    "deit": _of("DeiTForImageClassification", image),
    "beit": _of("BeitForImageClassification", image, use_relative_position_bias=True),
    "dinov2": _of("Dinov2ForImageClassification", image, mlp_ratio=2),
    "dinov3": _of("DINOv3ViTModel", image, config="DINOv3ViTConfig"),
    "ijepa": _of("IJepaModel", image),
    "hiera": _of("HieraForImageClassification", large_image, image_size=[64, 64], embed_dim=32,
                 depths=[1, 1, 1], num_heads=[1, 2, 4], num_query_pool=2, patch_stride=[4, 4],
                 masked_unit_size=[4, 4], mlp_ratio=2.0, **DEFAULTS),
    "swin": _of("SwinForImageClassification", image, **SWIN),
    "swinv2": _of("Swinv2ForImageClassification", image, **SWIN),
    "convnext": _of("ConvNextForImageClassification", image, **CONVOLUTIONS),
    "convnextv2": _of("ConvNextV2ForImageClassification", image, **CONVOLUTIONS),
    "resnet": _of("ResNetForImageClassification", image, embedding_size=16, **CONVOLUTIONS),
    "regnet": _of("RegNetForImageClassification", image, embedding_size=16, groups_width=16,
                  **CONVOLUTIONS),
    "poolformer": _of("PoolFormerForImageClassification", image, config="PoolFormerConfig",
                      **CONVOLUTIONS),
    "segformer": _of("SegformerForImageClassification", large_image, depths=[1, 1, 1, 1],
                     hidden_sizes=[16, 32, 48, 64], num_attention_heads=[1, 2, 3, 4]),
    "pvt v2": _of("PvtV2ForImageClassification", large_image, depths=[1, 1, 1, 1],
                  hidden_sizes=[16, 32, 48, 64], num_attention_heads=[1, 2, 3, 4], image_size=64),
    "mobilevit": _of("MobileViTForImageClassification", large_image, hidden_sizes=[32, 48, 64],
                     neck_hidden_sizes=[8, 16, 16, 24, 32, 48, 64], image_size=64, patch_size=2),
    "mobilenet v2": _of("MobileNetV2ForImageClassification", image, depth_multiplier=0.25),
    "efficientnet": _of("EfficientNetForImageClassification", image, width_coefficient=0.25,
                        depth_coefficient=0.25, hidden_dim=320),
    "levit": _of("LevitForImageClassification", large_image, hidden_sizes=[32, 48, 64],
                 depths=[1, 1, 1], num_attention_heads=[2, 3, 4], key_dim=[16, 16, 16],
                 patch_size=DEFAULT, image_size=64),
    "focalnet": _of("FocalNetForImageClassification", image, embed_dim=32, depths=[1, 1],
                    focal_levels=[2, 2], focal_windows=[3, 3], patch_size=4),
    "vit mae": _of("ViTMAEForPreTraining", lambda: {**image(), "noise": torch.rand(2, 16)},
                   decoder_hidden_size=32,
                   decoder_num_attention_heads=4, decoder_num_hidden_layers=1,
                   decoder_intermediate_size=64),
    "siglip vision": _of("SiglipVisionModel", image, config="SiglipVisionConfig"),
    "clip": _of("CLIPModel", both, text_config=TEXT, vision_config=VISION, projection_dim=32),
    "siglip": _of("SiglipModel", both, text_config=TEXT, vision_config=VISION),
    "yolos": _of("YolosModel", image, image_size=[32, 32], num_detection_tokens=4),
    "dpt": _of("DPTModel", image, is_hybrid=False),
    "imagegpt": _of("ImageGPTModel", text, config="ImageGPTConfig"),
    "videomae": _of("VideoMAEModel", lambda: {"pixel_values": torch.randn(1, 4, 3, 32, 32)},
                    num_frames=4),
    "timesformer": _of("TimesformerModel", lambda: {"pixel_values": torch.randn(1, 4, 3, 32, 32)},
                       num_frames=4),
}  # fmt: skip

SPEECH_MODELS = {
    "whisper": _of("WhisperForConditionalGeneration",
                   lambda: {**mel()(), "decoder_input_ids": ids(2, 8)}, max_source_positions=16),
    "wav2vec2": _of("Wav2Vec2Model", sound, **SPEECH),
    "hubert": _of("HubertModel", sound, **SPEECH),
    "wavlm": _of("WavLMModel", sound, **SPEECH),
    "data2vec audio": _of("Data2VecAudioModel", sound, **SPEECH),
    "unispeech": _of("UniSpeechModel", sound, **SPEECH),
    "sew": _of("SEWModel", sound, squeeze_factor=2, **SPEECH),
    "wav2vec2 conformer": _of("Wav2Vec2ConformerModel", sound, **SPEECH,
                              conv_depthwise_kernel_size=7),
    "wav2vec2 bert": _of("Wav2Vec2BertModel",
                         lambda: {"input_features": torch.randn(2, 16, 160)},
                         apply_spec_augment=False, conv_depthwise_kernel_size=7),
    "audio spectrogram": _of("ASTModel", lambda: {"input_values": torch.randn(2, 32, 32)},
                             config="ASTConfig", max_length=32, num_mel_bins=32,
                             frequency_stride=8, time_stride=8),
    "speech2text": _of("Speech2TextModel",
                       lambda: {"input_features": torch.randn(2, 32, 80),
                                "decoder_input_ids": ids(2, 8)},
                       conv_channels=64, config="Speech2TextConfig"),
    "moonshine": _of("MoonshineModel",
                     lambda: {"input_values": torch.randn(2, 3200),
                              "decoder_input_ids": ids(2, 8)},
                     encoder_num_hidden_layers=1, decoder_num_hidden_layers=1,
                     encoder_num_attention_heads=4, decoder_num_attention_heads=4,
                     encoder_num_key_value_heads=4, decoder_num_key_value_heads=4),
}  # fmt: skip

OTHERS = {
    "decision transformer": _of(
        "DecisionTransformerModel",
        lambda: {
            "states": torch.randn(2, 8, 17), "actions": torch.randn(2, 8, 4),
            "rewards": torch.randn(2, 8, 1), "returns_to_go": torch.randn(2, 8, 1),
            "timesteps": torch.arange(8).repeat(2, 1),
        },
    ),
    "patchtst": _of(
        "PatchTSTModel", lambda: {"past_values": torch.randn(2, 32, 3)},
        num_input_channels=3, context_length=32, patch_length=8, patch_stride=8,
    ),
    "patchtsmixer": _of(
        "PatchTSMixerModel", lambda: {"past_values": torch.randn(2, 32, 3)},
        num_input_channels=3, context_length=32, patch_length=8, patch_stride=8,
        config="PatchTSMixerConfig",
    ),
    "esm": _of("EsmForMaskedLM", labelled, position_embedding_type="rotary", mask_token_id=32),
    "perceiver": _of("PerceiverModel", lambda: {"inputs": torch.randn(2, 16, 64)},
                     d_latents=64, num_latents=8, num_self_attends_per_block=1,
                     num_self_attention_heads=4, num_cross_attention_heads=4),
}  # fmt: skip

ARCHITECTURES: dict[str, HuggingFace] = {
    **LANGUAGE,
    **EXPERTS,
    **STATE_SPACE,
    **ENCODER_DECODER,
    **VISION_MODELS,
    **SPEECH_MODELS,
    **OTHERS,
}
