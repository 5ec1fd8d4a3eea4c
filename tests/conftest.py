"""Of tests with many long cases, `make test` runs some and `make test-all` every one.

A test whose cases are contracts of their own (a release, a sampler, a mechanism, a form in which
clients are computed) belongs here only if all of its cases together take many seconds.

Of properties that hypothesis tries, it looks at fewer examples.
"""

import gc
import sys
from zlib import crc32

import hypothesis
import pytest

hypothesis.settings.register_profile("some", max_examples=40)

WITH_PAGES = (
    "tests/browser/",
    "tests/contracts/test_no_bare_epsilon.py",
    "tests/e2e/",
    "tests/runs/test_comparison.py",
    "tests/runs/test_priced_report.py",
    "tests/runs/test_report.py",
    "tests/runs/test_closing.py",
    "tests/runs/test_interruptions.py",
    "tests/runs/test_run.py",
    "tests/runs/test_run_notes.py",
    "tests/runs/test_run_resume.py",
    "tests/watch/",
    "tests/pages/",
)
"""Whose runs draw their reports, which takes a third of the time of runs as small as these."""

ONE_IN = {
    "tests/audit/test_persons.py": {
        "test_reports_of_a_client_with_and_without_a_person_keep_to_the_claim": (1, "person]")
    },
    "tests/audit/test_planted_bugs.py": {
        "test_releases_as_they_are_pass": 2,
        "test_noise_reused_between_clients": (1, "two-point"),
        "test_noise_reused_between_rounds": (1, "two-point"),
        "test_a_record_moves_a_step_by_the_clip_at_most": (1, "module1"),
    },
    "tests/audit/test_randomisers.py": {"test_plans_that_are_less_common": 2},
    "tests/audit/test_shadow_models.py": {
        "test_losses_are_those_of_trainings_one_by_one": (1, "looped")
    },
    "tests/base/test_checks.py": {"test_values_are_refused_before_anything_heavy_is_imported": 12},
    "tests/base/test_forks.py": {"test_what_would_outlive_a_sealed_fork_is_refused": 3},
    "tests/base/test_interrupts.py": {
        "test_an_interrupt_during_a_fork_is_not_lost": (2, "trial pool")
    },
    "tests/contracts/test_enemies.py": {
        "test_trainings_that_differ_share_no_noise": (1, "a number in a loss")
    },
    "tests/contracts/test_figures.py": {"test_nothing_overlaps_or_leaves_the_page": 4},
    "tests/contracts/test_from_outside.py": {"test_an_engine": 2},
    "tests/contracts/test_gate.py": {"test_nothing_goes_around_the_mechanisms": 3},
    "tests/contracts/test_hiding_places.py": {
        "test_a_client_moves_the_sum_by_its_clip": (12, "layer_in_place"),
        "test_a_record_of_another_client_moves_nothing_of_dp_sgd": 40,
    },
    "tests/contracts/test_leave_one_out.py": {
        "test_a_record_moves_a_step_of_dp_sgd_by_its_clip": (
            2,
            "transformer dropout",
            "positions",
            "batch normed",
            "tied",
            "vectorised",
        ),
        "test_own_losses": 6,
        "test_a_client_moves_the_sum_by_its_clip": (
            1,
            "transformer dropout",
            "own lstm",
            "attent",
            "positions",
            "used twice",
            "tied",
        ),
        "test_with_secure_noise_a_sum_moves_by_the_record_s_own_row_and_no_bit_more": (
            1,
            "lstm",
            "attention",
        ),
        "test_with_secure_noise_the_sum_moves_by_the_client_s_own_row_and_no_bit_more": (
            3,
            "own lstm",
            "positions",
            "tied",
        ),
        "test_modules_that_no_claim_covers_are_refused_in_one_line": 3,
        "test_with_secure_noise_masks_are_fresh_and_rows_within_the_clip": (
            1,
            "transformer dropout",
        ),
        "test_modules_whose_records_see_each_other_are_looped_and_never_vectorised": (
            1,
            "attention over clients",
        ),
    },
    "tests/contracts/test_leave_one_person_out.py": {
        "test_a_person_moves_a_site_s_sum_by_one_clip": (1, "gru", "transformer"),
        "test_records_of_a_person_move_a_step_by_as_many_clips_as_count": (1, "named inputs"),
        "test_a_person_moves_a_step_by_one_clip": (1, "attention over clients", "lstm-vectorised"),
    },
    "tests/contracts/test_no_bare_epsilon.py": {"test_runs_and_their_ledgers": 3},
    "tests/contracts/test_odd_modules.py": {
        "test_records_that_see_each_other_are_computed_client_by_client": (
            6,
            "control flow by the batch",
        ),
        "test_trained_in_both_modes_as_autograd_has_it": 16,
        "test_refused_by_name_in_every_mode": 3,
    },
    "tests/contracts/test_refusals.py": {"test_a_client_that_diverges_counts_for_nothing": 3},
    "tests/contracts/test_reprs.py": {
        "test_results_show_nothing_that_is_computed_from_private_data": (1, "[secure")
    },
    "tests/contracts/test_stored_numbers.py": {"test_seeded_trainings_come_to_the_same_numbers": 4},
    "tests/data/test_bad_tables.py": {"test_the_command_line_says_it_in_one_line": 3},
    "tests/data/test_mnist.py": {"test_real": (1, "mnist-0.1307")},
    "tests/data/test_own_table.py": {
        "test_one_client_s_rows_decide_about_nothing_but_its_own_records": 2
    },
    "tests/e2e/test_cli_bad_input.py": {"test_a_bad_setting": 2, "test_bad_local_settings": 3},
    "tests/e2e/test_cli_ends.py": {"test_a_folder_that_is_closed": 4},
    "tests/e2e/test_cli_help.py": {
        "test_account_solves_for_what_is_left_out": 2,
        "test_looking_at_recipes_does_not_import_torch": 12,
    },
    "tests/e2e/test_cli_plan.py": {"test_nonsense_is_one_line_and_leaves_nothing": 3},
    "tests/e2e/test_cli_run.py": {"test_brackets_in_names_are_just_names": 2},
    "tests/e2e/test_kill.py": {"test_kill": 16},
    "tests/e2e/test_own_tables.py": {"test_one_command_trains_on_a_table": 2},
    "tests/flower/test_hostile_messages.py": {
        "test_memory_stays_small_whatever_length_is_sent": (1, "5242880")
    },
    "tests/flower/test_run_server.py": {"test_claims_are_the_simulators": 2},
    "tests/flower/test_site_modules.py": {"test_a_report_does_not_depend_on_the_reports_before": 4},
    "tests/masking/test_sums.py": {
        "test_every_set_of_dropouts_of_five_sites_at_every_step": (1, "3-5")
    },
    "tests/models/test_dropout.py": {
        "test_layers_that_are_computed_again_in_the_backward_pass_are_refused": (1, "[True"),
        "test_a_record_has_its_own_masks_in_every_form": 3,
    },
    "tests/models/test_isolation.py": {
        "test_what_cannot_be_captured_says_why": 2,
        "test_a_part_that_was_put_into_eval_mode_stays_in_it": 2,
    },
    "tests/models/test_metrics.py": {
        "test_every_metric_is_that_of_scikit_learn_however_it_is_cut": 3
    },
    "tests/models/test_text.py": {
        "test_single_examples_have_gradients_by_formula_by_vmap_and_by_autograd": (
            2,
            "transformer",
            "lstm-True",
        )
    },
    "tests/privacy/accounting/test_budget.py": {
        "test_a_rounds_epsilon_is_its_own_and_never_below_the_claim": 3
    },
    "tests/privacy/accounting/test_renyi.py": {
        "test_poisson_cohorts_are_dp_accountings": 6,
        "test_integer_moments_keep_their_digits_and_are_not_below": 8,
    },
    "tests/privacy/accounting/test_sampled_gaussian.py": {"test_it_is_the_library_s": 3},
    "tests/privacy/accounting/test_units.py": {
        "test_the_mixture_is_the_library_s": (1, "0.05-1.0-50", "0.01-"),
        "test_one_release_is_the_integral_and_not_below_it": 3,
        "test_one_unit_is_the_claim_itself_and_more_cost_more": 3,
    },
    "tests/privacy/noise/test_directed.py": {
        "test_the_component_and_the_rest_have_their_laws": 2,
        "test_floats_and_integers_decide_alike": 3,
        "test_floats_err_by_less_than_they_say": 3,
    },
    "tests/privacy/noise/test_gaps.py": {
        "test_every_subset_has_its_own_probability": 3,
        "test_floats_decide_as_arithmetic_of_60_digits_does": 3,
    },
    "tests/privacy/noise/test_grid.py": {
        "test_far_tail_has_the_exact_law": 3,
        "test_draws_have_the_exact_rounded_law": 2,
    },
    "tests/privacy/noise/test_mechanisms.py": {
        "test_odds_never_exceed_epsilon_for_any_two_inputs": 3
    },
    "tests/privacy/noise/test_secure_random.py": {"test_every_subset_is_equally_likely": 3},
    "tests/privacy/releases/test_priv_unit_secure.py": {
        "test_caps_are_met_as_often_as_epsilon_allows_and_no_more": 2,
        "test_reports_are_unbiased_and_have_their_variance": (1, "[1.0-"),
        "test_remainders_do_not_depend_on_the_update": 3,
    },
    "tests/privacy/test_clip_schedules.py": {
        "test_quantile_finds_the_quantile_of_log_normal_norms": 4
    },
    "tests/privacy/test_priced_metrics.py": {"test_poisson_beside_a_gaussian_is_the_library_s": 4},
    "tests/runs/test_closing.py": {
        "test_a_crash_at_the_end_leaves_a_run_that_is_open_or_whole": 3,
        "test_plain_reading_warns_of_it": 2,
        "test_what_was_changed_is_named": 3,
    },
    "tests/runs/test_corruption.py": {
        "test_what_can_be_mended_goes_on_and_says_so": 3,
        "test_what_cannot_be_trusted_is_refused_with_one_line": 4,
    },
    "tests/runs/test_interruptions.py": {
        "test_metrics_checkpoint_and_result_agree": 4,
        "test_they_agree_when_the_screen_is_interrupted": 4,
    },
    "tests/runs/test_logs.py": {"test_a_log_equals_metrics_jsonl": 2},
    "tests/runs/test_opened_run.py": {"test_rows_that_do_not_fit_are_one_line": 2},
    "tests/runs/test_recipe.py": {"test_shipped_recipes_run_on_embedded_data": 4},
    "tests/runs/test_run_notes.py": {
        "test_class_weights_are_the_same_by_formula_and_by_autograd": (1, "dp-sgd")
    },
    "tests/runs/test_run_resume.py": {"test_every_kind_of_plan_resumes_to_the_same_model": 3},
    "tests/runs/test_secure_runs.py": {
        "test_every_kind_of_run_says_that_its_noise_is_secure": 3,
        "test_two_secure_runs_of_one_seed_differ_and_two_seeded_ones_do_not": (2, "[ldp-fl"),
    },
    "tests/runs/test_sites.py": {
        "test_claims_name_the_record_and_whom_it_trusts": (1, "part-trusts0-secure")
    },
    "tests/runs/test_texts.py": {"test_a_model_of_texts_trains_and_reads_new_ones": 2},
    "tests/statistical/test_draws.py": {"test_nothing_is_drawn_twice": 3},
    "tests/statistical/test_ending.py": {
        "test_what_counts_is_kept_under_every_rule": (1, "2.0643147", "10.0-400")
    },
    "tests/statistical/test_modes.py": {
        "test_a_bound_that_is_too_small_grows_and_one_too_large_shrinks": 2,
        "test_modes_agree": 5,
    },
    "tests/statistical/test_whole_runs.py": {
        "test_the_clients_noise_is_what_was_charged": (1, "Laplace-secure"),
        "test_two_point_reports_are_what_was_charged": (1, "none-secure"),
    },
    "tests/test_parsers_fuzz.py": {"test_a_damaged_input_is_read_or_refused": 3},
    "tests/training/engines/test_chunks.py": {
        "test_branches_of_any_level_come_to_the_same_to_the_last_bit": 3
    },
    "tests/training/engines/test_one_computation.py": {
        "test_processes_come_to_the_same_bits": (1, "little memory")
    },
    "tests/training/engines/test_processes.py": {
        "test_workers_that_die_between_rounds_are_replaced": 2,
        "test_modes_agree_over_rounds": 3,
        "test_the_number_of_workers_changes_nothing": 4,
    },
    "tests/training/engines/test_ray_pool.py": {"test_tasks_of_several_chunks_come_to_the_same": 6},
    "tests/training/engines/test_spawned_workers.py": {
        "test_what_a_script_defines_is_not_sent": (1, "__main__")
    },
    "tests/training/gradients/test_kinds.py": {
        "test_clipping_is_a_loop_over_single_records": 24,
        "test_frozen_parameters_are_no_part_of_it": 6,
    },
    "tests/training/gradients/test_per_example.py": {
        "test_known_layers_use_their_formulas_and_are_right": 3
    },
    "tests/training/gradients/test_per_example_bound.py": {
        "test_one_record_moves_the_sum_by_at_most_the_bound": 3,
        "test_no_record_is_so_large_that_its_scale_is_rounded_up": 4,
        "test_no_record_is_large_enough_to_pass_the_bound": (1, "squared_error"),
        "test_a_record_without_a_finite_gradient_counts_as_zero": 3,
    },
    "tests/training/gradients/test_stacked.py": {
        "test_a_record_without_a_finite_gradient_counts_as_zero": 2,
        "test_bounded_sums_are_those_of_vmap": 3,
        "test_means_are_those_of_vmap_for_any_shape": 3,
        "test_nothing_that_was_given_is_changed": (1, "dual"),
    },
    "tests/training/gradients/test_stacked_choice.py": {
        "test_a_hook_that_changes_gradients_is_not_forgotten": 2,
        "test_records_with_axes_are_flattened_or_not_taken": 18,
        "test_chains_of_linear_layers_are_batched_algebra_and_all_are_right": 3,
    },
    "tests/training/gradients/test_stacked_span.py": {
        "test_local_sgd_ends_where_it_ends_in_any_form": 3
    },
    "tests/training/gradients/test_vmapped.py": {
        "test_means_are_those_of_one_client_after_the_other": 6,
        "test_every_example_is_clipped_by_itself": (1, "[False"),
    },
    "tests/training/test_exchange.py": {"test_modes_agree_on_whole_trainings": 3},
    "tests/training/test_in_step.py": {
        "test_rounds_are_those_of_separate_trainings": (1, "nothing"),
        "test_trainings_on_other_records_are_those_alone": (1, "nothing"),
    },
    "tests/training/test_independence.py": {
        "test_a_client_moves_the_sum_by_its_own_row_exactly": (1, "[2")
    },
    "tests/training/test_inputs.py": {
        "test_bags_learn_the_same_in_both_modes_or_are_looped": 2,
        "test_every_example_is_clipped_by_itself": (1, "lstm-looped"),
    },
    "tests/training/test_module_contract.py": {
        "test_what_a_module_begins_to_remember_ends_with_its_client": 2
    },
    "tests/training/test_over_clients.py": {"test_it_is_measured_when_it_was_asked_for": 2},
    "tests/training/test_persons.py": {
        "test_with_secure_noise_a_person_moves_the_sum_by_its_own_row_and_no_bit_more": (
            1,
            "small-cnn",
            "mlp",
            "softmax",
        ),
        "test_sites_train_per_person": (1, "part-True", "True-record"),
        "test_dp_sgd_with_secure_noise_trains_per_person": (1, "12-"),
        "test_people_join_with_the_rate_and_all_their_records_with_them": (1, "True"),
    },
    "tests/training/test_secure_dp_sgd.py": {
        "test_a_record_moves_the_sum_by_its_own_row_exactly": (1, "small-cnn", "mlp", "softmax")
    },
    "tests/training/test_session.py": {
        "test_modes_agree_on_whole_private_trainings": (1, "small-cnn")
    },
    "tests/training/test_side_by_side.py": {
        "test_slots_are_independent_and_others_keep_their_bits": (1, "[cnn", "dual mlp"),
        "test_reports_of_others_keep_every_bit": 3,
        "test_every_kind_of_work_keeps_to_its_slot": 2,
    },
    "tests/training/test_site_sums.py": {
        "test_masked_sums_are_those_in_the_clear_to_the_last_bit": 2
    },
    "tests/training/test_targets.py": {
        "test_a_run_from_python_has_the_usual_loss_and_predicts": (3, "next words"),
        "test_both_modes_learn_the_same": (2, "next words"),
        "test_every_example_is_clipped_by_itself": (1, "next words-looped"),
    },
    "tests/training/test_whole_numbers.py": {
        "test_records_that_see_each_other_are_found_though_the_first_are_alike": 12
    },
    "tests/training/test_work.py": {"test_local_steps_are_torchs_for_each_ragged_client": 9},
    "tests/tuning/test_sweep.py": {
        "test_another_sweep_in_the_same_place_is_refused": 3,
        "test_repetitions_in_step_that_a_crash_tore_apart_come_to_the_same": 2,
    },
    "tests/tuning/test_theory_runs.py": {
        "test_trainings_do_what_the_theory_speaks_of": (2, "everyone-laplace")
    },
    "tests/tuning/test_trials.py": {"test_repetitions_in_step_are_those_one_by_one": 3},
    "tests/watch/test_run_status.py": {"test_whatever_is_in_a_file_the_run_is_looked_at": 4},
}
"""Which cases of a test the quick suite runs, as a number or (number, words ...).

Cases with one of the words in their names are slow. With n, so are all others but the first and one
in n, by a hash of their names, so that it is the same everywhere.
"""


def pytest_configure(config):
    if config.option.markexpr == "not slow":
        hypothesis.settings.load_profile("some")


@pytest.fixture(autouse=True)
def no_page(request, monkeypatch):
    """No report of runs, where nobody looks at it."""
    if "fedveil.runs.run" in sys.modules and not request.node.nodeid.startswith(WITH_PAGES):
        monkeypatch.setattr("fedveil.runs.run.report_html", lambda folder, **_: b"")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    some = {(file, name): n for file, each in ONE_IN.items() for name, n in each.items()}
    begun = set()
    for item in items:
        test = item.nodeid.split("::")[0], getattr(item, "originalname", None)
        if test in some and item.get_closest_marker("slow") is None:
            n, *words = (some[test],) if isinstance(some[test], int) else some[test]
            case = item.nodeid[item.nodeid.find("[") :]
            left_out = test in begun and crc32(item.nodeid.encode()) % n
            if left_out or any(word in case for word in words):
                item.add_marker(pytest.mark.slow)
            else:
                begun.add(test)


def pytest_collection_finish():
    """What was imported stays to the end: looking through it for garbage is for nothing.

    Neither is there much else to find, so that it is looked for more rarely.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 50)
