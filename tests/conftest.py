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
    "tests/audit/test_planted_bugs.py": {"test_releases_as_they_are_pass": 2},
    "tests/base/test_interrupts.py": {"test_an_interrupt_during_a_fork_is_not_lost": 2},
    "tests/contracts/test_from_outside.py": {"test_an_engine": 2},
    "tests/contracts/test_no_bare_epsilon.py": {"test_runs_and_their_ledgers": 3},
    "tests/contracts/test_hiding_places.py": {
        "test_a_client_moves_the_sum_by_its_clip": 4,
        "test_a_record_of_another_client_moves_nothing_of_dp_sgd": 6,
    },
    "tests/contracts/test_leave_one_out.py": {
        "test_a_record_moves_a_step_of_dp_sgd_by_its_clip": 2,
        "test_own_losses": 6,
    },
    "tests/contracts/test_odd_modules.py": {
        "test_records_that_see_each_other_are_computed_client_by_client": 6,
        "test_trained_in_both_modes_as_autograd_has_it": 8,
    },
    "tests/contracts/test_stored_numbers.py": {"test_seeded_trainings_come_to_the_same_numbers": 4},
    "tests/data/test_bad_tables.py": {"test_the_command_line_says_it_in_one_line": 3},
    "tests/e2e/test_cli_bad_input.py": {"test_a_bad_setting": 2, "test_bad_local_settings": 3},
    "tests/e2e/test_cli_ends.py": {"test_a_folder_that_is_closed": 4},
    "tests/e2e/test_cli_help.py": {
        "test_account_solves_for_what_is_left_out": 2,
        "test_looking_at_recipes_does_not_import_torch": 3,
    },
    "tests/e2e/test_cli_plan.py": {"test_nonsense_is_one_line_and_leaves_nothing": 3},
    "tests/e2e/test_cli_run.py": {"test_brackets_in_names_are_just_names": 2},
    "tests/e2e/test_kill.py": {"test_kill": 8},
    "tests/flower/test_site_modules.py": {"test_a_report_does_not_depend_on_the_reports_before": 2},
    "tests/e2e/test_own_tables.py": {"test_one_command_trains_on_a_table": 2},
    "tests/models/test_dropout.py": {"test_a_record_has_its_own_masks_in_every_form": 3},
    "tests/models/test_metrics.py": {
        "test_every_metric_is_that_of_scikit_learn_however_it_is_cut": 3
    },
    "tests/models/test_text.py": {
        "test_single_examples_have_gradients_by_formula_by_vmap_and_by_autograd": 2
    },
    "tests/privacy/accounting/test_renyi.py": {
        "test_poisson_cohorts_are_dp_accountings": 3,
        "test_integer_moments_keep_their_digits_and_are_not_below": 4,
    },
    "tests/privacy/test_priced_metrics.py": {"test_poisson_beside_a_gaussian_is_the_library_s": 2},
    "tests/privacy/noise/test_gaps.py": {"test_every_subset_has_its_own_probability": 3},
    "tests/privacy/test_clip_schedules.py": {
        "test_quantile_finds_the_quantile_of_log_normal_norms": 4
    },
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
    "tests/runs/test_secure_runs.py": {
        "test_every_kind_of_run_says_that_its_noise_is_secure": 3,
        "test_two_secure_runs_of_one_seed_differ_and_two_seeded_ones_do_not": 2,
    },
    "tests/runs/test_texts.py": {"test_a_model_of_texts_trains_and_reads_new_ones": 2},
    "tests/statistical/test_draws.py": {"test_nothing_is_drawn_twice": 3},
    "tests/statistical/test_modes.py": {
        "test_a_bound_that_is_too_small_grows_and_one_too_large_shrinks": 2,
        "test_modes_agree": 5,
    },
    "tests/base/test_checks.py": {"test_values_are_refused_before_anything_heavy_is_imported": 4},
    "tests/test_parsers_fuzz.py": {"test_a_damaged_input_is_read_or_refused": 3},
    "tests/training/engines/test_chunks.py": {
        "test_branches_of_any_level_come_to_the_same_to_the_last_bit": 3
    },
    "tests/training/engines/test_processes.py": {
        "test_workers_that_die_between_rounds_are_replaced": 2,
        "test_modes_agree_over_rounds": 3,
        "test_the_number_of_workers_changes_nothing": 4,
    },
    "tests/training/gradients/test_kinds.py": {
        "test_clipping_is_a_loop_over_single_records": 6,
        "test_frozen_parameters_are_no_part_of_it": 3,
    },
    "tests/training/gradients/test_stacked.py": {
        "test_a_record_without_a_finite_gradient_counts_as_zero": 2
    },
    "tests/training/gradients/test_stacked_choice.py": {
        "test_a_hook_that_changes_gradients_is_not_forgotten": 2,
        "test_records_with_axes_are_flattened_or_not_taken": 3,
    },
    "tests/training/gradients/test_vmapped.py": {
        "test_means_are_those_of_one_client_after_the_other": 2
    },
    "tests/training/test_module_contract.py": {
        "test_what_a_module_begins_to_remember_ends_with_its_client": 2
    },
    "tests/training/gradients/test_per_example.py": {
        "test_known_layers_use_their_formulas_and_are_right": 3
    },
    "tests/training/test_inputs.py": {"test_bags_learn_the_same_in_both_modes_or_are_looped": 2},
    "tests/training/test_over_clients.py": {"test_it_is_measured_when_it_was_asked_for": 2},
    "tests/training/engines/test_ray_pool.py": {"test_tasks_of_several_chunks_come_to_the_same": 6},
    "tests/training/test_targets.py": {
        "test_a_run_from_python_has_the_usual_loss_and_predicts": 3,
        "test_both_modes_learn_the_same": 2,
    },
    "tests/training/test_whole_numbers.py": {
        "test_records_that_see_each_other_are_found_though_the_first_are_alike": 3
    },
    "tests/training/test_work.py": {"test_local_steps_are_torchs_for_each_ragged_client": 3},
    "tests/tuning/test_sweep.py": {
        "test_another_sweep_in_the_same_place_is_refused": 3,
        "test_repetitions_in_step_that_a_crash_tore_apart_come_to_the_same": 2,
    },
    "tests/tuning/test_theory_runs.py": {"test_trainings_do_what_the_theory_speaks_of": 2},
    "tests/tuning/test_trials.py": {"test_repetitions_in_step_are_those_one_by_one": 3},
    "tests/watch/test_run_status.py": {"test_whatever_is_in_a_file_the_run_is_looked_at": 4},
}
"""Which cases run follows from their names, so that it is the same everywhere."""


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
        if test in some:
            if test in begun and crc32(item.nodeid.encode()) % some[test]:
                item.add_marker(pytest.mark.slow)
            begun.add(test)


def pytest_collection_finish():
    """What was imported stays to the end: looking through it for garbage is for nothing.

    Neither is there much else to find, so that it is looked for more rarely.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 50)
