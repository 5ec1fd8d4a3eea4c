"""Of tests with many long cases, `make test` runs some and `make test-all` every one."""

from zlib import crc32

import pytest

ONE_IN = {
    "tests/contracts/test_leave_one_out.py": {
        "test_a_client_moves_the_sum_by_its_clip": 2,
        "test_a_record_moves_a_step_of_dp_sgd_by_its_clip": 2,
        "test_with_secure_noise_the_sum_moves_by_the_client_s_own_row_and_no_bit_more": 2,
    },
    "tests/contracts/test_noise_is_never_reused.py": {"test_no_two_draws_of_a_run_share_a_key": 2},
    "tests/contracts/test_odd_modules.py": {"test_trained_in_both_modes_as_autograd_has_it": 2},
    "tests/contracts/test_stored_numbers.py": {"test_seeded_trainings_come_to_the_same_numbers": 3},
    "tests/data/test_bad_tables.py": {"test_the_command_line_says_it_in_one_line": 3},
    "tests/e2e/test_cli_bad_input.py": {"test_bad_local_settings": 3, "test_a_bad_setting": 2},
    "tests/e2e/test_cli_plan.py": {"test_nonsense_is_one_line_and_leaves_nothing": 3},
    "tests/e2e/test_kill.py": {"test_kill": 3},
    "tests/models/test_metrics.py": {
        "test_every_metric_is_that_of_scikit_learn_however_it_is_cut": 3
    },
    "tests/privacy/noise/test_gaps.py": {
        "test_every_subset_has_its_own_probability": 3,
        "test_floats_decide_as_arithmetic_of_60_digits_does": 3,
    },
    "tests/privacy/noise/test_mechanisms.py": {
        "test_odds_never_exceed_epsilon_for_any_two_inputs": 2
    },
    "tests/privacy/noise/test_secure_random.py": {"test_every_subset_is_equally_likely": 3},
    "tests/privacy/test_clip_schedules.py": {
        "test_quantile_finds_the_quantile_of_log_normal_norms": 4
    },
    "tests/runs/test_closing.py": {"test_plain_reading_warns_of_it": 2},
    "tests/runs/test_corruption.py": {
        "test_what_cannot_be_trusted_is_refused_with_one_line": 2,
        "test_what_can_be_mended_goes_on_and_says_so": 3,
    },
    "tests/runs/test_interruptions.py": {
        "test_metrics_checkpoint_and_result_agree": 4,
        "test_they_agree_when_the_screen_is_interrupted": 4,
    },
    "tests/runs/test_recipe.py": {"test_shipped_recipes_run_on_embedded_data": 2},
    "tests/runs/test_run.py": {"test_every_kind_of_plan_resumes_to_the_same_model": 3},
    "tests/runs/test_secure_runs.py": {
        "test_every_kind_of_run_says_that_its_noise_is_secure": 3,
        "test_two_secure_runs_of_one_seed_differ_and_two_seeded_ones_do_not": 2,
    },
    "tests/statistical/test_draws.py": {"test_nothing_is_drawn_twice": 2},
    "tests/statistical/test_modes.py": {"test_modes_agree": 3},
    "tests/statistical/test_whole_runs.py": {"test_the_servers_noise_is_what_was_charged": 2},
    "tests/training/engines/test_processes.py": {
        "test_the_number_of_workers_changes_nothing": 4,
        "test_modes_agree_over_rounds": 2,
    },
    "tests/training/gradients/test_per_example.py": {
        "test_one_record_moves_the_sum_by_at_most_the_bound": 2
    },
    "tests/training/gradients/test_stacked.py": {
        "test_local_sgd_ends_where_it_ends_in_any_form": 3
    },
    "tests/training/test_targets.py": {"test_both_modes_learn_the_same": 2},
    "tests/training/test_work.py": {"test_local_steps_are_torchs_for_each_ragged_client": 3},
}
"""Which cases run follows from their names, so that it is the same everywhere."""


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
