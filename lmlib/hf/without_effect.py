"""Keys of a config.json that say nothing about a model's numbers on whole sequences.

They are passed over by name: a key that is not here could be another model's.
"""

# Of every family. Dropout is the experiment's.
WITHOUT_EFFECT = frozenset(
    {
        # which file this is, and of which program
        "_commit_hash", "_name_or_path", "architectures", "auto_map", "is_llama_config",
        "model_type", "name_or_path", "tokenizer_class", "transformers.js_config",
        "transformers_version", "unsloth_fixed", "unsloth_version",
        # how it is computed
        "_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
        "cache_implementation", "chunk_size_feed_forward", "dtype", "gradient_checkpointing",
        "is_decoder", "is_encoder_decoder", "output_attentions", "output_hidden_states",
        "output_past", "pretraining_tp", "return_dict", "torch_dtype", "torchscript",
        "use_bfloat16", "use_cache", "use_return_dict",
        # how it was trained
        "attention_dropout", "attn_pdrop", "embd_pdrop", "embedding_dropout",
        "initializer_range", "max_sequence_length", "resid_pdrop", "residual_dropout",
        "tf_legacy_loss",
        # of other heads and tasks
        "_num_labels", "finetuning_task", "id2label", "label2id", "num_labels", "prefix",
        "problem_type", "task_specific_params",
        # of generation
        "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cls_token_id",
        "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping",
        "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
        "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length",
        "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
        "num_return_sequences", "output_scores", "pad_token_id", "remove_invalid_values",
        "repetition_penalty", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
        "temperature", "top_k", "top_p", "typical_p",
    }
)  # fmt: skip

# Of every family, with these values alone, or null.
AT_REST: dict[str, object] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
    "quantization_config": None,
    "tie_encoder_decoder": False,
}
