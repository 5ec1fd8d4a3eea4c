"""Which tests look at a mutant, in which order: those that should notice come first."""

from pathlib import Path

from planted import Project

_ABOVE = {
    "audit": (),
    "data": ("runs",),
    "flower": (),
    "mixing": (),
    "papers": (),
    "privacy": ("training", "runs"),
    "training": ("runs",),
    "runs": (),
    "tuning": ("papers",),
    "watch": (),
}
_ENEMIES = (
    "contracts/test_enemies.py",
    "contracts/test_enemies_plans.py",
    "contracts/test_enemies_schedules.py",
)
_COUNTS = "contracts/test_the_claim_that_counts.py"
_ALSO = {
    **dict.fromkeys(
        (
            "attacks/backdoor_attack.py",
            "console.py",
            "privacy/accounting/claims.py",
            "privacy/accounting/meaning.py",
            "runs/opened_run.py",
            "runs/report/comparison.py",
            "runs/report/curves.py",
            "runs/report/run_page.py",
            "tuning/prepared_cell.py",
        ),
        (_COUNTS,),
    ),
    "audit/white_box_attackers.py": ("audit/test_white_box_attackers.py",),
    "attacks/backdoor_attack.py": ("attacks/test_backdoor_attack.py",),
    "audit/all_attacks.py": ("audit/test_itself.py", "audit/test_audit_command.py"),
    "audit/canaries.py": ("audit/test_itself.py", "audit/test_planted_bugs.py"),
    "audit/randomisers.py": ("audit/test_itself.py", "audit/test_planted_bugs.py"),
    "audit/record_canaries.py": ("audit/test_itself.py", "audit/test_planted_bugs.py"),
    "audit/self_test.py": ("audit/test_itself.py",),
    "audit/findings.py": (
        "audit/test_itself.py",
        "audit/test_planted_bugs.py",
        "audit/test_audit_command.py",
    ),
    "audit/views.py": ("audit/test_planted_bugs.py",),
    "data/user_arrays.py": ("data/test_federated.py", "training/test_whole_numbers.py"),
    "data/federated.py": ("data/test_schema.py", "data/test_own_table.py"),
    "console.py": ("test_console_claims.py", "runs/report/test_run_page.py"),
    "data/partition.py": ("data/test_own_table.py", "data/test_femnist.py"),
    "data/split.py": ("data/test_table_split.py", "data/test_own_table.py"),
    "data/fitting.py": ("data/test_bad_tables.py", "data/test_own_table.py"),
    "flower/client_app.py": ("flower/test_wire.py", "flower/test_app_process.py"),
    "flower/engine.py": (
        "flower/test_answers.py",
        "flower/test_absence.py",
        "flower/test_restart.py",
    ),
    "flower/fork_server.py": ("flower/test_executor.py",),
    "flower/messages.py": ("flower/test_wire.py", "flower/test_restart.py"),
    "flower/mod.py": ("flower/test_parts.py",),
    "flower/programs.py": ("test_interrupts.py",),
    "flower/round_log.py": ("flower/test_restart.py", "flower/test_run_server.py"),
    "flower/run_server.py": ("flower/test_absence.py", "flower/test_run_server.py"),
    "flower/strategy.py": ("flower/test_parts.py",),
    "data/table_split.py": ("data/test_own_table.py",),
    "flower/site.py": (
        "flower/test_site_asks.py",
        "flower/test_site_ledger.py",
        "flower/test_terms.py",
        "flower/test_site_mixer.py",
        "flower/test_policy.py",
    ),
    "flower/terms.py": ("flower/test_site_asks.py", "flower/test_policy.py"),
    "flower/site_ledger.py": ("flower/test_site_asks.py", "flower/test_policy.py"),
    "flower/deployment.py": ("flower/test_deployment.py",),
    "flower/mixer_file.py": ("flower/test_deployment.py",),
    "mixing/mixer.py": (
        "mixing/test_tls.py",
        "mixing/test_members.py",
        "contracts/test_enemies_mixer.py",
    ),
    "mixing/opened_rounds.py": ("mixing/test_members.py",),
    "privacy/accounting/renyi.py": (
        "privacy/accounting/test_composition_sampled.py",
        "privacy/accounting/test_composition_reports.py",
        "privacy/accounting/test_composition.py",
    ),
    "training/adversary.py": ("attacks/test_backdoor_attack.py",),
    "training/aggregates.py": ("training/test_aggregates.py", "attacks/test_backdoor_attack.py"),
    "privacy/accounting/spending.py": (
        "privacy/test_plan.py",
        "contracts/test_enemies_ending.py",
        "watch/test_run_status.py",
    ),
    "privacy/accounting/budget_line.py": (
        "statistical/test_ending.py",
        "statistical/test_budgets.py",
        "privacy/test_secure.py",
    ),
    "privacy/clip_schedules.py": (
        "contracts/test_identities.py",
        "privacy/releases/test_client_noise.py",
        "privacy/releases/test_client_noise_adaptive.py",
        "flower/test_site_asks.py",
    ),
    "privacy/ranges.py": ("flower/test_site_asks.py",),
    "privacy/curators.py": (
        "privacy/releases/test_client_noise_adaptive.py",
        "privacy/releases/test_client_noise.py",
    ),
    "identity.py": (
        "contracts/test_identities.py",
        "contracts/test_noise_is_never_reused.py",
        *_ENEMIES,
    ),
    "privacy/ledger/file.py": (
        "privacy/ledger/test_ledger_files.py",
        "privacy/ledger/test_ledger.py",
        "privacy/ledger/test_ledger_attempts.py",
        "privacy/ledger/test_verification.py",
    ),
    "privacy/ledger/ledger.py": (
        "runs/test_run_resume.py",
        "privacy/ledger/test_shared.py",
        "privacy/ledger/test_verification.py",
    ),
    "privacy/ledger/statement.py": (_COUNTS, "runs/test_secure_runs.py"),
    "privacy/noise/mechanisms.py": ("contracts/test_rates_drawn.py", "privacy/test_secure.py"),
    "privacy/noise/streams.py": (
        "contracts/test_rates_drawn.py",
        "privacy/noise/test_mechanisms.py",
        "training/test_in_step.py",
        "statistical/test_cohorts.py",
    ),
    "privacy/plan.py": (
        "contracts/test_identities.py",
        "privacy/test_clip_schedules.py",
        *_ENEMIES,
        "contracts/test_plan_and_work.py",
        "training/test_exchange.py",
        "training/test_in_step.py",
        "statistical/test_draws.py",
        "statistical/test_cohorts.py",
    ),
    "privacy/releases/central.py": (
        "contracts/test_identities.py",
        *_ENEMIES,
        "contracts/test_plan_and_work.py",
        "privacy/test_secure.py",
        "training/test_session.py",
        "runs/test_build.py",
        "statistical/test_draws.py",
        "statistical/test_whole_runs.py",
    ),
    "privacy/releases/client_noise.py": (
        "contracts/test_identities.py",
        *_ENEMIES,
        "contracts/test_plan_and_work.py",
        "runs/test_build.py",
        "statistical/test_draws.py",
        "statistical/test_budgets.py",
    ),
    "privacy/releases/counted.py": ("training/test_exchange.py", "training/test_dp_sgd.py"),
    "privacy/releases/dp_sgd.py": (
        "contracts/test_rates_drawn.py",
        "training/test_dp_sgd.py",
        "contracts/test_plan_and_work.py",
        *_ENEMIES,
        "runs/test_plans.py",
    ),
    "privacy/releases/release.py": (*_ENEMIES, "contracts/test_plan_and_work.py"),
    "privacy/releases/two_point.py": (
        "contracts/test_identities.py",
        "contracts/test_enemies_mixer.py",
        "privacy/test_plan.py",
        "contracts/test_plan_and_work.py",
        "training/test_exchange.py",
        "statistical/test_one_client.py",
        "statistical/test_draws.py",
    ),
    "privacy/sampling.py": ("contracts/test_rates_drawn.py", "statistical/test_cohorts.py"),
    "privacy/releases/priv_unit.py": ("contracts/test_rates_drawn.py",),
    "training/dp_sgd.py": ("contracts/test_rates_drawn.py",),
    "privacy/secure.py": ("runs/test_plans.py", "statistical/test_budgets.py"),
    "privacy/noisy_steps.py": ("training/test_dp_sgd.py",),
    "privacy/watching.py": (
        "contracts/test_rates_drawn.py",
        "flower/test_answers.py",
        "privacy/test_clip_schedules.py",
        "privacy/releases/test_central.py",
        "privacy/releases/test_client_noise.py",
        "privacy/releases/test_client_noise_adaptive.py",
        *_ENEMIES,
        "statistical/test_whole_runs.py",
    ),
    "training/agreement.py": (
        "contracts/test_plan_and_work.py",
        "training/test_session.py",
        "runs/test_plans.py",
    ),
    "training/batches.py": ("statistical/test_modes.py",),
    "training/engines/chunks.py": ("training/engines/test_serial.py",),
    "training/engines/serial.py": (
        "training/engines/test_processes.py",
        "training/test_in_step.py",
        *_ENEMIES,
        "contracts/test_leave_one_out.py",
    ),
    "training/engines/engine.py": (
        *_ENEMIES,
        "training/test_session.py",
        "runs/test_secure_runs.py",
    ),
    "training/engines/workers.py": (
        "training/engines/test_processes.py",
        *_ENEMIES,
    ),
    "training/evaluate.py": (
        "training/engines/test_serial.py",
        "training/engines/test_processes.py",
    ),
    "training/exchange.py": (
        "contracts/test_refusals.py",
        "training/engines/test_serial.py",
        "statistical/test_one_client.py",
        "statistical/test_draws.py",
        "contracts/test_plan_and_work.py",
        "training/test_in_step.py",
    ),
    "training/gradients/choice.py": ("training/engines/test_serial.py",),
    "training/gradients/convolutions.py": ("training/gradients/test_kinds.py",),
    "training/gradients/linear_chain.py": (
        "training/gradients/test_stacked.py",
        "training/gradients/test_stacked_choice.py",
        "training/gradients/test_stacked_span.py",
    ),
    "training/gradients/looped.py": ("contracts/test_leave_one_out.py",),
    "training/gradients/vmapped.py": (
        "training/gradients/test_per_example.py",
        "training/gradients/test_per_example_bound.py",
        "training/gradients/test_stacked.py",
        "training/gradients/test_stacked_choice.py",
        "training/gradients/test_stacked_span.py",
    ),
    "training/engines/on_ray/node.py": ("contracts/test_refusals.py",),
    "training/reports.py": ("contracts/test_refusals.py", "statistical/test_one_client.py"),
    "training/sums.py": ("contracts/test_refusals.py",),
    "training/round.py": (
        "contracts/test_enemies_ending.py",
        "flower/test_absence.py",
        "flower/test_restart.py",
        "statistical/test_one_client.py",
        "statistical/test_cohorts.py",
        "statistical/test_whole_runs.py",
    ),
    "training/session.py": (
        "contracts/test_identities.py",
        "training/test_whole_numbers.py",
        *_ENEMIES,
        "contracts/test_noise_is_never_reused.py",
        "contracts/test_leave_one_out.py",
        "statistical/test_cohorts.py",
    ),
    "training/turn.py": (
        "training/test_work.py",
        "training/gradients/test_stacked_choice.py",
        "training/gradients/test_stacked_span.py",
    ),
    "training/work.py": (
        "contracts/test_identities.py",
        *_ENEMIES,
        "runs/test_build.py",
        "runs/test_plans.py",
        "statistical/test_one_client.py",
        "statistical/test_modes.py",
    ),
    "runs/build.py": (
        "runs/test_plans.py",
        "runs/test_priced_metrics.py",
        "runs/test_secure_runs.py",
        "runs/test_run.py",
    ),
    "runs/checkpoint.py": ("runs/test_corruption.py", "runs/test_disk_full.py"),
    "runs/disk.py": ("runs/test_stop_request.py", "runs/test_run.py", "runs/test_run_resume.py"),
    "runs/ending.py": (_COUNTS, "runs/test_stop_request.py"),
    "runs/done.py": ("runs/test_interruptions.py", "runs/test_run.py", "runs/test_run_resume.py"),
    "runs/ledgers.py": (
        "runs/test_evidence.py",
        "runs/test_run_resume.py",
        "runs/test_run.py",
        "flower/test_restart.py",
    ),
    "runs/metrics_file.py": ("runs/test_corruption.py", "runs/test_interruptions.py"),
    "runs/report/ledger_section.py": ("runs/report/test_run_page.py",),
    "runs/report/run_contents.py": ("runs/report/test_run_page.py",),
    "runs/run.py": (
        _COUNTS,
        "runs/test_stop_request.py",
        "runs/test_secure_runs.py",
        "runs/test_evidence.py",
        "runs/test_interruptions.py",
    ),
    "runs/stop_request.py": ("runs/test_stop_request.py",),
    **dict.fromkeys(
        (
            "runs/sections/client_section.py",
            "runs/sections/clip_section.py",
            "runs/sections/noise_section.py",
            "runs/sections/rates_section.py",
            "runs/sections/server_section.py",
        ),
        (
            "runs/test_build.py",
            "runs/test_plans.py",
            "runs/test_priced_metrics.py",
            "runs/test_secure_runs.py",
            "runs/test_run.py",
        ),
    ),
    "runs/sections/section.py": ("runs/test_recipe.py",),
    "runs/trackers.py": ("runs/test_logs.py",),
    "papers/naseri_defences.py": ("papers/test_naseri.py", "papers/test_naseri_backdoors.py"),
    "tuning/simulate.py": ("tuning/test_plan_command.py", "tuning/test_planner.py"),
    "tuning/trials.py": ("tuning/test_trial_noise.py", "tuning/test_sweep.py"),
    "watch/app.py": ("watch/test_access.py",),
    "watch/run_status.py": (_COUNTS, "watch/test_cards.py"),
    "web/layout.py": ("watch/test_app.py",),
}
_WIDE = ("contracts", "statistical")


def stages_of(project: Project, file: str) -> list[list[Path]]:
    """Lists of test files, each to be run only if the ones before it noticed nothing."""
    part = Path(file).parts[0]
    wanted = [
        _mirrors(project, file),
        [test for name in _WIDE for test in project.tests(f"{name}/**/test_*.py")],
        *(project.tests(f"{name}/**/test_*.py") for name in (part, *_ABOVE.get(part, ()))),
        project.tests("e2e/**/test_*.py"),
    ]
    seen: set[Path] = set()
    stages = []
    for tests in wanted:
        stage = [test for test in tests if test not in seen]
        seen.update(stage)
        if stage:
            stages.append(stage)
    return stages


def _mirrors(project: Project, file: str) -> list[Path]:
    """tests/<folder>/test_<name>*.py, the file's doctests, and what else should notice soon."""
    path = Path(file)
    found = project.tests(f"{path.parent}/test_{path.stem}*.py")
    named = [project.root / "tests" / test for test in _ALSO.get(file, ())]
    return [*found, project.package / file, *(test for test in named if test.is_file())]
