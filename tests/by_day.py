"""Select the cases of long tests that run in the fast suite; the rest are marked nightly.

CI has two cores and 20 minutes. A test that is not in the table runs with all its cases. For a test
in the table, the given number of cases stays in the fast suite, evenly spaced in their order. With
0 the whole test runs in `nox -s nightly` only; a shorter test then covers the same code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent

NUM_BY_DAY = {
    "benchmarks/test_gpu.py": {
        "test_a_script_says_that_it_needs_a_gpu": 6,
    },
    "benchmarks/test_serving.py": {
        "test_our_server_answers_both_loads": 0,
        "test_vllm_is_measured_as_its_users_start_it": 0,
    },
    "chat/test_families.py": {
        "test_any_text_is_read_alike_however_it_is_cut": 8,
        "test_what_the_template_writes_is_read_again": 8,
    },
    "cli/test_streams.py": {
        "test_a_closed_stream_is_as_the_null_device": 5,
    },
    "compile/capture/test_dynamo.py": {
        "test_the_sizes_of_the_caches_are_not_in_the_graph": 1,
    },
    "compile/capture/test_few_layers.py": {
        "test_groups_of_layers_are_repeated": 1,
        "test_the_graph_is_that_of_all_layers": 1,
    },
    "compile/capture/test_graph_cache.py": {
        "test_a_file_that_cannot_be_trusted_is_ignored": 2,
        "test_the_graph_comes_back_and_computes_the_same": 2,
        "test_the_key_follows_what_tracing_depends_on": 6,
    },
    "compile/fusions/test_combine_experts.py": {
        "test_a_layer_has_one_call_of_each": 1,
    },
    "compile/fusions/test_fuse_all_reduce_norm.py": {
        "test_finds_the_norms_of_models": 1,
    },
    "compile/fusions/test_fuse_few_tokens_of_experts.py": {
        "test_no_bit_changes": 1,
    },
    "compile/fusions/test_fuse_gated_norm.py": {
        "test_gated_norms_are_one_call": 1,
        "test_near_misses_are_left": 2,
    },
    "compile/fusions/test_fuse_norm.py": {
        "test_residual_sums_are_part_of_the_norms_behind_them": 1,
    },
    "compile/fusions/test_fuse_rope_cos_sin.py": {
        "test_finds_the_tables_and_changes_no_bit": 2,
    },
    "compile/fusions/test_fuse_rope_latent.py": {
        "test_joins_both_calls_of_each_layer_and_changes_no_bit": 1,
        "test_what_is_not_quite_the_pattern_is_left_alone": 1,
    },
    "compile/fusions/test_fuse_router.py": {
        "test_tokens_are_those_of_hugging_face": 1,
        "test_what_is_not_quite_the_router_stays": 3,
    },
    "compile/fusions/test_fuse_shared_expert.py": {
        "test_another_gate_keeps_its_operations": 2,
        "test_no_bit_changes": 0,
        "test_tokens_are_those_of_hugging_face": 1,
        "test_what_is_not_quite_such_a_sum_stays": 1,
    },
    "compile/fusions/test_fuse_wide_linear.py": {
        "test_all_around_experts_is_found_beside_it": 1,
        "test_what_is_not_quite_that_stays": 1,
    },
    "compile/fusions/test_fusion.py": {
        "test_finds_the_structure_and_changes_no_bit": 4,
    },
    "compile/fx/test_spec.py": {
        "test_a_planted_violation_is_found": 3,
        "test_graphs_satisfy_the_spec": 3,
        "test_matmuls_that_a_gpu_leaves_to_the_library_are_reported": 1,
    },
    "compile/inductor/test_complex.py": {
        "test_a_complex_rotation_computes_the_same": 0,
    },
    "compile/inductor/test_regions.py": {
        "test_a_cut_graph_computes_the_same": 2,
        "test_experts_that_are_added_in_place_compute_the_same": 0,
        "test_wrappers_go_only_where_they_do_nothing": 2,
    },
    "compile/load/test_gguf_tokenizer.py": {
        "test_a_text_gets_the_tokens_that_the_file_says": 20,
        "test_ids_are_those_of_llama_cpp": 36,
    },
    "compile/load/test_int4_layouts.py": {
        "test_every_three_neighbouring_zero_points": 2,
        "test_words_that_borrow_throughout": 5,
    },
    "compile/load/test_quantized_drafter.py": {
        "test_answers_do_not_depend_on_it": 1,
        "test_kernels_of_a_gpu_compute_layers_and_head": 1,
        "test_linear_layers_and_the_head_become_fp8": 1,
    },
    "compile/load/test_slices.py": {
        "test_a_rank_has_the_slices_of_the_whole": 7,
    },
    "compile/lowering/test_gpu_quantized.py": {
        "test_integers_are_lowered_for_a_gpu": 0,
        "test_lowered_for_a_gpu": 1,
    },
    "compile/lowering/test_invariant_calls.py": {
        "test_a_row_has_the_same_bits_among_any_others": 15,
        "test_of_models_all_are_ours_and_packed_once": 1,
    },
    "compile/model/test_attention.py": {
        "test_all_is_as_it_was_after_an_error": 8,
        "test_threads_call_functions_of_their_own": 3,
    },
    "compile/model/test_aux_states.py": {
        "test_a_step_returns_what_enters_the_layers": 2,
    },
    "compile/model/test_indexers.py": {
        "test_another_computation_is_refused": 3,
        "test_calls_know_what_is_chosen_for_them": 1,
        "test_index_keys_are_stored_in_the_blocks": 0,
    },
    "compile/passes/test_cache_latents.py": {
        "test_a_graph_that_differs_stays_as_it_is": 5,
        "test_models_with_latent_attention_cache_latents": 1,
    },
    "compile/passes/test_cleanup.py": {
        "test_no_matmul_is_left_to_the_library": 1,
    },
    "compile/passes/test_index_gpu_passes.py": {
        "test_tokens_are_those_of_hugging_face": 0,
    },
    "compile/passes/test_merge_linear.py": {
        "test_merges_and_changes_nothing": 2,
        "test_records_what_running_every_node_gives": 2,
    },
    "compile/passes/test_share_heads.py": {
        "test_repeated_heads_are_shared": 1,
    },
    "compile/passes/test_write_as_real.py": {
        "test_a_rotation_is_written_in_real_numbers": 3,
        "test_models_have_no_complex_numbers_left": 1,
    },
    "compile/test_captured_drafter.py": {
        "test_an_engine_has_the_drafter_of_its_config": 1,
        "test_passes_for_a_gpu_find_their_patterns": 1,
    },
    "compile/test_captured_model.py": {
        "test_tokens_and_logits_equal_hugging_face": 5,
    },
    "compile/test_start_record.py": {
        "test_a_restored_model_computes_the_same": 3,
        "test_experts_are_restored_in_a_process_that_knows_no_model": 1,
        "test_quantised_weights_are_the_same": 3,
    },
    "coverage/test_coverage.py": {
        "test_entries_that_are_equal": 1,
        "test_entries_that_are_refused": 2,
    },
    "distributed/test_drafts.py": {
        "test_all_ranks_compute_the_measured_steps": 0,
    },
    "distributed/test_replicas.py": {
        "test_a_row_that_kills_its_replicas_is_abandoned_alone": 0,
    },
    "golden/test_drafters.py": {
        "test_eagle3_computes_what_plain_torch_does": 2,
        "test_mtp_computes_what_transformers_does": 1,
        "test_mtp_drafts_are_those_of_transformers_generate": 1,
    },
    "golden/test_golden.py": {
        "test_smollm2_equals_generate": 1,
        "test_tiny_models_equal_generate": 13,
        "test_tiny_models_equal_generate_beyond_every_threshold": 4,
    },
    "golden/test_latent.py": {
        "test_answers_do_not_depend_on_the_schedule": 0,
        "test_bfloat16_errs_no_more_than_with_heads_cached": 0,
        "test_the_gate_sees_matmuls_of_heads_that_follow_the_batch": 0,
    },
    "golden/test_odd_sizes.py": {
        "test_answers_do_not_depend_on_the_schedule": 0,
    },
    "golden/test_quantized.py": {
        "test_answers_do_not_depend_on_the_schedule": 0,
        "test_equals_generate_with_the_dequantised_weights": 2,
        "test_int4_is_near_linear_layers_that_round_to_bfloat16": 3,
    },
    "golden/test_recurrent.py": {
        "test_recurrent_models_equal_generate": 2,
    },
    "golden/test_sparse.py": {
        "test_answers_do_not_depend_on_the_schedule": 0,
        "test_equal_scores_are_told_apart_as_transformers_decodes": 0,
        "test_other_ways_to_compute_equal_generate": 0,
        "test_sparse_models_equal_generate": 1,
        "test_sparse_models_equal_generate_beyond_every_threshold": 0,
    },
    "kernels/attention/test_decode.py": {
        "test_matches_float64": 10,
        "test_whoever_arrives_last_merges_and_leaves_the_counters_zero": 4,
    },
    "kernels/attention/test_decode_forms.py": {
        "test_no_batch_has_a_form_of_its_own": 0,
    },
    "kernels/attention/test_decode_prologue.py": {
        "test_decode": 6,
        "test_forms": 4,
    },
    "kernels/attention/test_e4m3_tiles.py": {
        "test_compiled_for_hopper": 0,
        "test_matches_float64": 10,
    },
    "kernels/attention/test_prefill.py": {
        "test_bits_are_those_of_decode": 3,
    },
    "kernels/attention/test_quantized_results.py": {
        "test_are_those_of_stored_outputs": 4,
    },
    "kernels/jit/test_parallel_build.py": {
        "test_kernels_are_built_together": 0,
    },
    "kernels/matmul/cpu/test_invariant.py": {
        "test_a_row_has_the_same_bits_among_any_others": 6,
    },
    "kernels/matmul/test_matmul.py": {
        "test_counts_every_summand_once": 20,
    },
    "kernels/matmul/test_wide_matmul.py": {
        "test_each_part_starts_from_zero_on_hopper": 0,
    },
    "kernels/mla/test_decode_sm90.py": {
        "test_it_compiles_for_hopper": 0,
    },
    "kernels/mla/test_dispatch.py": {
        "test_matmuls_of_heads": 6,
    },
    "kernels/mla/test_kernels.py": {
        "test_matches_float64": 5,
    },
    "kernels/mla/test_prefill_sm90.py": {
        "test_it_compiles_for_hopper_and_leaves_what_it_does_not_know": 0,
    },
    "kernels/moe/test_combine_norm.py": {
        "test_a_shared_expert_is_added_as_by_operations_in_turn": 8,
        "test_bits_are_those_of_two_kernels": 12,
    },
    "kernels/moe/test_route_rows.py": {
        "test_results_are_those_of_three_kernels": 6,
    },
    "kernels/recurrent/test_kernels.py": {
        "test_kernels_do_not_keep_states_behind_draft_tokens": 10,
        "test_kernels_give_the_bits_of_sequences_alone": 6,
    },
    "kernels/recurrent/test_ops.py": {
        "test_chunks_give_the_bits_of_the_whole": 30,
    },
    "kernels/sampling/test_edit_frequencies.py": {
        "test_draws_fit_the_definition": 5,
    },
    "kernels/sampling/test_sampler.py": {
        "test_frequencies_follow_the_masked_softmax": 1,
    },
    "kernels/sparse/test_chosen.py": {
        "test_schedules_give_the_same_bits": 1,
        "test_sees_what_was_chosen_and_no_more": 6,
    },
    "kernels/sparse/test_index_kernels.py": {
        "test_schedules_choose_alike": 1,
    },
    "kernels/test_cpu_threads.py": {
        "test_attention_of_a_few_queries_is_that_of_all": 3,
    },
    "kernels/test_odd_sizes.py": {
        "test_attention": 5,
        "test_matmuls_of_heads": 1,
    },
    "property/test_refinement.py": {
        "test_the_real_objects_do_what_the_specification_does": 2,
    },
    "runner/cpu/test_threads.py": {
        "test_bits_do_not_follow_the_number_of_threads": 0,
    },
    "runner/gpu/test_runner.py": {
        "test_tokens_are_those_of_hugging_face": 1,
    },
    "runner/test_draft_edits.py": {
        "test_a_function_is_called_once_for_each_token_of_the_answer": 3,
        "test_a_function_that_fails_ends_its_request_at_that_token": 20,
        "test_edits_follow_the_history_of_each_sample": 8,
    },
    "runner/test_drafts.py": {
        "test_no_answer_depends_on_draft_tokens": 5,
    },
    "runner/test_model_drafts.py": {
        "test_a_drafter_reads_the_next_tokens_and_the_hidden_states": 4,
        "test_a_model_that_drafts_for_itself_is_always_right": 6,
        "test_another_model_changes_no_output": 2,
    },
    "runner/test_new_input.py": {
        "test_layers_that_are_not_traced_read_it_as_well": 0,
    },
    "runner/test_step_costs.py": {
        "test_steps_with_draft_tokens_are_measured": 1,
    },
    "runner/test_structured_reasoning.py": {
        "test_reasoning_is_that_of_the_request_without_a_constraint": 2,
    },
    "server/test_bad_fields.py": {
        "test_one_wrong_item_is_enough": 6,
    },
    "server/test_bodies.py": {
        "test_it_is_parsed_as_the_standard_library_does": 10,
        "test_the_loop_goes_on_meanwhile": 3,
    },
    "server/test_constrained_reasoning.py": {
        "test_a_forced_call_comes_behind_the_reasoning": 1,
        "test_the_content_behind_the_reasoning_meets_the_constraint": 2,
    },
    "server/test_cuts.py": {
        "test_every_way_of_cutting": 4,
    },
    "server/test_generation_config.py": {
        "test_each_setting_is_a_default_that_a_field_overrides": 2,
        "test_ignored_settings_are_reported_once_per_start": 0,
    },
    "server/test_held_bodies.py": {
        "test_open_paths_hold_no_body": 2,
    },
    "server/test_large_bodies.py": {
        "test_a_large_constraint_is_read_off_the_loop": 2,
        "test_bodies_of_some_size_take_no_thread_of_chats": 1,
    },
    "server/test_logprobs.py": {
        "test_log_probabilities_point_into_the_text": 1,
    },
    "server/test_long_texts.py": {
        "test_others_are_answered_meanwhile": 2,
    },
    "server/test_owners.py": {
        "test_a_flood_does_not_keep_another_client_waiting": 1,
    },
    "server/test_pipelining.py": {
        "test_half_of_a_head_behind_a_body": 10,
    },
    "server/test_scored_prompts.py": {
        "test_a_prompt_as_long_as_the_context_is_echoed": 2,
        "test_a_prompt_as_long_as_the_context_is_scored": 2,
    },
    "server/test_slow_constraints.py": {
        "test_many_choices": 2,
        "test_what_cannot_be_kept_is_refused_at_the_door": 2,
    },
    "server/test_stop_in_reasoning.py": {
        "test_a_stop_string_counts_from_the_content_on": 40,
    },
    "server/test_streamed_answers.py": {
        "test_chats": 4,
        "test_completions": 6,
        "test_reasoning_and_calls": 12,
    },
    "spec/test_spec.py": {
        "test_the_scope_of_a_defect_is_clean_without_it": 10,
    },
    "test_draft_edits.py": {
        "test_outputs_do_not_depend_on_draft_tokens": 2,
    },
    "test_fp8_at_load.py": {
        "test_all_linear_layers_become_fp8": 1,
    },
    "test_known_defects.py": {
        "test_continuations_of_a_prompt_have_their_own_draft_tokens": 1,
        "test_log_probabilities_are_those_without_draft_tokens": 1,
        "test_ngrams_do_not_change_an_answer": 1,
        "test_nothing_is_left_behind_a_stop_string": 2,
        "test_penalties_count_each_accepted_token": 1,
        "test_preempted_requests_drop_their_draft_tokens": 1,
    },
    "test_kv_cache_dtype.py": {
        "test_every_way_to_run_gives_the_tokens": 1,
    },
    "test_llm.py": {
        "test_settings_that_do_not_suit_the_model": 3,
    },
    "test_logprobs.py": {
        "test_a_score_is_the_float_that_was_sampled": 2,
        "test_beside_hugging_face": 2,
    },
    "test_model_drafts.py": {
        "test_answers_are_equal_and_a_model_is_always_right_about_itself": 2,
        "test_costs_of_the_drafter_are_measured": 1,
        "test_drafts_of_a_head_are_those_of_whole_passes": 1,
    },
    "test_quantization.py": {
        "test_bits_do_not_depend_on_the_schedule": 2,
        "test_logits_and_stats": 2,
    },
    "test_speculation.py": {
        "test_conversations_found_in_the_cache_of_hybrids": 1,
        "test_every_output_is_equal_to_the_bit": 3,
        "test_other_models": 3,
    },
    "test_structured_drafts.py": {
        "test_forced_tool_calls_do_not_depend_on_draft_tokens": 1,
        "test_json_does_not_depend_on_draft_tokens": 2,
    },
    "verify/test_draft_groups.py": {
        "test_answers_do_not_depend_on_draft_tokens": 1,
    },
    "verify/test_gate.py": {
        "test_answers_do_not_depend_on_the_schedule": 1,
        "test_answers_of_models_with_matmuls_of_their_own_do_not_depend_on_the_schedule": 0,
        "test_answers_of_recurrent_models_do_not_depend_on_the_schedule": 0,
        "test_groups_without_hits_or_preemptions_show_nothing": 1,
    },
}


def mark_nightly(items: Sequence[pytest.Item], *, is_whole: bool) -> None:
    """Mark the cases that do not run by day.

    Args:
        is_whole: whether each file of ``items`` was collected whole. If not, cases were named,
            and all of them run.

    Raises:
        pytest.UsageError: a test of the table is not in its file, or has no more cases than run.
    """
    if not is_whole:
        return
    cases: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        if item.path.is_relative_to(_TESTS):
            file = item.path.relative_to(_TESTS).as_posix()
            if file in NUM_BY_DAY and not _has_own_session(item):
                name = getattr(item, "originalname", item.name)
                cases.setdefault(file, defaultdict(list))[name].append(item)
    for file, tests in cases.items():
        for name, num_by_day in NUM_BY_DAY[file].items():
            found = tests[name]
            if len(found) <= num_by_day:
                raise pytest.UsageError(f"tests/by_day.py: {file}::{name} has {len(found)} cases")
            kept = {i * len(found) // num_by_day for i in range(num_by_day)}
            for i, item in enumerate(found):
                if i not in kept:
                    item.add_marker(pytest.mark.nightly)


def _has_own_session(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("gpu", "nightly", "browser"))
