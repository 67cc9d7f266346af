"""What all tests share."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from hypothesis import settings

from tests.ranks import warm_python, without_external_callbacks

# How long an example takes depends on what else the machine does.
settings.register_profile("no deadline", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=25)  # of `make test`
settings.load_profile("no deadline")

# As many as a rank has: the last bits of torch's sums depend on the number of threads.
torch.set_num_threads(1)

# Folders of small tests. A worker runs a file whole, and one that starts last is waited for.
LAST = {"distributed", "pipeline", "planning", "pruning", "sparse", "support"}

# What `make test-slow` runs and `make test` leaves out: more grids, models and ends of a job than
# one of each kind, and what waits for clocks. Parts of the names of tests.
SLOW = (
    "benchmarks/test_gpu.py::test_steps",
    "benchmarks/test_gpu.py::test_training_keeps",
    "benchmarks/test_gpu.py::test_two_ranks",
    "benchmarks/test_inference.py::test_every_row_runs",
    "benchmarks/test_inference.py::test_generate_of_gpt2_runs",
    "benchmarks/test_memory.py::test_every_row",
    "benchmarks/test_perplexity.py",
    "callbacks/test_gradual_pruning.py::test_by_default_a_run_of_any_length",
    "checkpoint/test_atomic_io.py::test_a_thread_leaves",
    "checkpoint/test_folder.py::test_each_node_copies",
    "checkpoint/test_safetensors.py::test_decoding_returns",
    "cli/sweep/test_sweep.py",
    "cli/test_evaluate.py::test_the_metrics_are_those_of_the_run[one.ckpt-2",
    "cli/test_train.py::test_a_command_says_which_folder_it_cannot_make[evaluate",
    "cli/test_train.py::test_a_command_says_which_folder_it_cannot_make[train -m",
    "cli/test_train.py::test_a_search_finds",
    "cli/test_train.py::test_a_vgg_loses",
    "cli/test_train.py::test_debugging_a_run",
    "cli/test_train.py::test_every_grid",
    "clients/test_",
    "compat/test_callbacks.py::test_the_graph_of_tensorboard",
    "compat/test_lockstep.py::test_a_callback_that_cannot_save",
    "compat/test_lockstep.py::test_a_rank_that_fails_alone",
    "compat/test_lockstep.py::test_ranks_of_mpiexec_save",
    "compat/test_lockstep.py::test_ranks_that_fail_together_save_the_whole_model[plugins1]",
    "compat/test_logging.py::test_everything_logged_equals_one_process[11]",
    "compat/test_metrics.py::test_two_stages_by_two_replicas",
    "compat/test_metrics.py::test_unusual_metrics_on_two_stages_by_two_replicas",
    "compat/test_sampling.py::test_replicas_augment",
    "corpus/test_published.py",
    "corpus/test_ranks.py",
    "distributed/mpi/test_process_group.py::test_on_three_ranks",
    "examples/test_gpt.py::test_learns_and_logs",
    "faults/test_batches.py::test_stages_that_draw_other_samples_raise[data0",
    "faults/test_false_alarms.py",
    "faults/test_files.py::test_a_rank_killed_during_a_write",
    "faults/test_files.py::test_a_rank_killed_while_stages",
    "faults/test_hosts.py",
    "faults/test_mpiexec.py",
    "faults/test_open_mpi.py",
    "faults/test_resuming.py",
    "faults/test_slurm.py",
    "faults/test_waits.py",
    "launcher/test_call.py::test_the_next_call_removes",
    "launcher/test_fork_server.py::test_close_ranks",
    "launcher/test_fork_server.py::test_if_a_guard_is_killed",
    "launcher/test_fork_server.py::test_if_it_cannot_be_reached",
    "launcher/test_fork_server.py::test_if_it_is_killed",
    "launcher/test_fork_server.py::test_it_ends_when_it_was_not_used_for_long",
    "launcher/test_fork_server.py::test_it_ends_with_the_process",
    "launcher/test_launcher.py::test_a_call_has_the_effects",
    "launcher/test_launcher.py::test_a_callback_on_ranks_prunes",
    "launcher/test_launcher.py::test_a_rank_that_cannot_begin",
    "launcher/test_launcher.py::test_after_ctrl_c",
    "launcher/test_launcher.py::test_from_a_notebook",
    "launcher/test_launcher.py::test_from_a_script",
    "launcher/test_launcher.py::test_nothing_survives",
    "launcher/test_launcher.py::test_other_hosts_cannot_connect",
    "mpi/test_mpich.py",
    "mpi/test_node_collectives.py::test_real_ranks_end_with_the_same_bits[2]",
    "mpi/test_node_collectives.py::test_real_ranks_end_with_the_same_bits[4]",
    "ops/test_convolution.py::test_the_weight_is_not_read",
    "parity/test_batches.py",
    "parity/test_beyond_peers.py",
    "parity/test_buffers.py",
    "parity/test_callbacks.py",
    "parity/test_changed_weights.py::test_micro_batches_in_flight_see_weights_that_forward_changes[samo]",
    "parity/test_channels.py",
    "parity/test_checkpoints.py::test_a_grid_continues_the_run_of_another",
    "parity/test_checkpoints.py::test_the_file_is_what_one_process_writes",
    "parity/test_construction.py",
    "parity/test_containers.py",
    "parity/test_emissions.py",
    "parity/test_expert_balance.py::test_a_bias_balances_experts_over_replicas",
    "parity/test_expert_losses.py::test_experts_of_transformers_as_they_come_over_ranks",
    "parity/test_expert_losses.py::test_the_balance_of_experts_in_any_order",
    "parity/test_expert_losses.py::test_the_balance_of_experts_is_that_of_the_batch[as many",
    "parity/test_expert_losses.py::test_the_balance_of_experts_is_that_of_the_batch[counts-4",
    "parity/test_expert_losses.py::test_transformers_as_they_come[gpt-oss]",
    "parity/test_expert_losses.py::test_transformers_as_they_come[olmoe]",
    "parity/test_expert_losses.py::test_transformers_as_they_come[qwen",
    "parity/test_experts.py",
    "parity/test_families.py",
    "parity/test_finetuning.py",
    "parity/test_gradient_hooks.py::test_hooks_see_the_batch_of_a_replica_on_ranks",
    "parity/test_inner_backward.py::test_the_last_stage_refuses",
    "parity/test_kept_values.py",
    "parity/test_losses.py::test_ranks_do_what_one_process_does",
    "parity/test_losses.py::test_replicas_mean",
    "parity/test_losses.py::test_stages_in_one_process_do_too[1-",
    "parity/test_losses.py::test_stages_in_one_process_do_too[2-class weights",
    "parity/test_losses.py::test_stages_in_one_process_do_too[2-hidden",
    "parity/test_losses.py::test_stages_in_one_process_do_too[2-items",
    "parity/test_losses.py::test_stages_in_one_process_do_too[2-padding, accumulated",
    "parity/test_losses.py::test_stages_in_one_process_do_too[2-padding, recomputed",
    "parity/test_losses.py::test_stages_in_one_process_do_too[2-shape of one",
    "parity/test_losses.py::test_stages_in_one_process_do_too[2-sum",
    "parity/test_losses.py::test_stages_in_one_process_do_too[2-supervised contrastive, recomputed",
    "parity/test_losses.py::test_stages_in_one_process_do_too[2-variational, recomputed",
    "parity/test_losses.py::test_stages_in_one_process_do_too[4-",
    "parity/test_masters.py",
    "parity/test_muon.py",
    "parity/test_parity.py::test_a_grid_does_what_one_process_does[3x1",
    "parity/test_parity.py::test_two_pipelines",
    "parity/test_precision.py",
    "parity/test_pretrained.py",
    "parity/test_pruning.py::test_pruning_of_all_stages_in_one_process[each layer by itself]",
    "parity/test_pruning.py::test_pruning_of_all_stages_in_one_process[rewound",
    "parity/test_regrid.py",
    "parity/test_reruns.py::test_layers_that_are_pruned",
    "parity/test_state.py::test_on_two_ranks",
    "parity/test_state.py::test_replicas_of_shorter",
    "parity/test_state.py::test_what_is_too_large",
    "parity/test_step_outputs.py",
    "parity/test_tickets.py::test_every_grid_draws_the_ticket_of_one_process[3x1]",
    "parity/test_tickets.py::test_stages_keep",
    "parity/test_untrained.py::test_every_grid_prunes_the_rest_as_one_process",
    "parity/test_weight_averages.py",
    "pipeline/shard/test_optimizer_shards.py::test_a_failing_run",
    "pipeline/shard/test_optimizer_shards.py::test_every_way_resumes",
    "pipeline/shard/test_optimizer_shards.py::test_gradients_are_divided",
    "pipeline/shard/test_optimizer_shards.py::test_three_replicas",
    "pipeline/shard/test_optimizers.py::test_ranks_train_to_the_same_bits",
    "pipeline/test_choice.py::test_peaks_follow_memory_and_numbers_do_not[loopback]",
    "pipeline/test_choice.py::test_peaks_follow_memory_and_numbers_do_not[mpi",
    "pipeline/test_pipeline.py::test_of_a_layer_that_is_compiled",
    "planning/test_search.py::test_the_search_finds",
    "pruning/test_selection.py::test_stages_compute_the_masks_of_one_process[3",
    "report/test_report.py::test_one_rank_before",
    "report/test_report.py::test_two_replicas",
    "sparse/test_export.py::test_onnx_computes_the_same[convolutions]",
    "sparse/test_export.py::test_onnx_computes_the_same[transformer",
    "sparse/test_kernels.py::test_fused_kernels_agree_with_the_reference",
    "sparse/test_layers.py::test_compiled_whole_without",
    "step/test_learning.py::test_noise_of_other_generators_is_that_of_one_process[fixed_noise-2-mean",
    "step/test_learning.py::test_noise_of_other_generators_is_that_of_one_process[fixed_noise-3",
    "step/test_learning.py::test_noise_of_other_generators_is_that_of_one_process[forked_noise-2-mean",
    "step/test_learning.py::test_noise_of_other_generators_is_that_of_one_process[forked_noise-3",
    "step/test_learning.py::test_noise_of_other_generators_is_that_of_one_process[own_noise-2-whole",
    "step/test_learning.py::test_noise_of_other_generators_is_that_of_one_process[own_noise-3",
    "store/test_materialize.py::test_the_hook",
    "strategy/test_regrid.py::test_a_run_moves",
    "strategy/test_said.py::test_ranks_say_two_lines",
    "strategy/test_said.py::test_the_rest_is_for_who_asks",
    "strategy/test_strategy.py::test_a_ticket_comes_back",
    "strategy/test_tensor_parallel.py::test_a_module_is_split_again",
    "support/test_dense_products.py::test_a_product_is_torchs",
    "support/test_lightning_names.py::test_modules_and_trainers_of_the_other_name_train_on_ranks",
    "support/test_lightning_names.py::test_the_name_that_was_imported_first",
    "support/test_lightning_names.py::test_two_sets",
    "support/test_memory.py::test_larger_blocks",
    "test_commands.py::test_a_sweep_is_gathered",
    "test_commands.py::test_arguments_of_every_command",
    "test_examples.py",
    "test_imports.py::test_what_few_runs_need",
    "test_notebooks.py::test_runs_from_top_to_bottom",
    "test_nothing_left_behind.py",
    "test_readme.py::test_block[expert",
    "test_readme.py::test_block[getting-started",
)


# Collecting tests makes hundreds of thousands of objects, of torch and others, which live until the
# end: each search for garbage among them would take longer than many a test.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):  # Before the workers start, which share them.
        warm_python()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = re.compile("|".join(map(re.escape, SLOW)))
    for item in items:
        if slow.search(item.nodeid):
            item.add_marker("slow")
    items.sort(key=lambda item: not LAST.isdisjoint(item.path.parts))


@pytest.fixture
def threads():
    """Sets the number of torch's threads, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def quick_trainers() -> None:
    without_external_callbacks()
