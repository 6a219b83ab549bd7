"""The tests of runs, checkpoints and commands that cannot apply to object stores, with the reasons."""

from __future__ import annotations

LAYOUT = "it moves or makes folders of steps by hand; on an object store the record says which steps exist"
LOCKS = "it edits the files of a lock"
NAMES = "it expects the names of step folders on a disk"
RENAMES = "it refuses or holds a rename or a sync, which object stores do not have"
# By file, or by file and test.
DISK_ONLY = {
    "tests/unit/run/test_best_link.py": "it reads a symbolic link",
    "tests/unit/run/test_cancelled_deletions.py": RENAMES,
    "tests/unit/run/test_catalog.py": LAYOUT,
    "tests/unit/run/test_damaged_lock.py": LOCKS,
    "tests/unit/run/test_directory.py::test_file_in_place_of_run_is_reported": "an object does not hide a prefix",
    "tests/unit/run/test_directory.py::test_foreign_entries_are_left_alone": "it makes empty folders",
    "tests/unit/run/test_directory.py::test_foreign_highest_generation_refuses_save": NAMES,
    "tests/unit/run/test_directory.py::test_lock_hidden_by_a_cache_is_found": LOCKS,
    "tests/unit/run/test_directory.py::test_names_of_new_saves": NAMES,
    "tests/unit/run/test_directory.py::test_owner_asks_disk_once_and_reader_each_time": LAYOUT,
    "tests/unit/run/test_directory.py::test_step_is_saved_next_to_broken_copy": NAMES,
    "tests/unit/run/test_failed_syncs.py": RENAMES,
    "tests/unit/run/test_history.py": "it edits the lines of a file that is appended to",
    "tests/unit/run/test_lock.py": LOCKS,
    "tests/unit/run/test_lock_owner.py": LOCKS,
    "tests/unit/run/test_pending_deletions.py": RENAMES,
    "tests/unit/run/test_record.py": "it edits the versions of a record and the notes of earlier releases",
    "tests/unit/run/test_unknown_entries.py": "an object store lists no entries of unknown kind",
    "tests/unit/run/test_unresponsive_disk.py": "it holds calls of a disk; the stand-in stalls requests elsewhere",
    "tests/unit/run/test_lineage.py::test_abandoned_step_is_replaced_by_new_save": NAMES,
    "tests/unit/run/test_lineage.py::test_copied_step_keeps_branch_abandoned": LAYOUT,
    "tests/unit/run/test_lineage.py::test_foreign_step_is_ordered_by_number": LAYOUT,
    "tests/unit/run/test_lineage.py::test_freed_name_is_not_abandoned": NAMES,
    "tests/unit/run/test_lineage.py::test_pinned_abandoned_step_survives_new_generation": NAMES,
    "tests/unit/run/test_lineage.py::test_reused_name_gets_no_old_metrics": NAMES,
    "tests/unit/run/test_lineage.py::test_saving_earlier_step_anew_is_roll_back": NAMES,
    "tests/unit/run/test_ownership.py": "it copies runs and moves them, and looks at their names",
    "tests/unit/run/test_restoring.py::test_an_io_error_is_damage": "it makes a pipe",
    "tests/unit/run/test_restoring.py::test_arrays_of_damaged_step_are_freed_first": "it writes into a file",
    "tests/unit/run/test_restoring.py::test_damaged_generation_falls_back_to_one_before": LAYOUT,
    "tests/unit/run/test_restoring.py::test_each_skipped_damaged_step_is_reported": NAMES,
    "tests/unit/run/test_restoring.py::test_manually_removed_step_falls_back": LAYOUT,
    "tests/unit/run/test_restoring.py::test_progress_and_history_count_bytes_read": NAMES,
    "tests/unit/run/test_restoring.py::test_unreadable_file_is_not_damage": "it takes the permissions of a file away",
    "tests/unit/run/test_retention.py": RENAMES,
    "tests/unit/run/test_run_log.py": "it reads and holds a history file that is appended to",
    "tests/unit/test_callback_close.py::test_wait_for_deletions_ends_at_deadline": RENAMES,
    "tests/unit/test_overwriting.py": "it puts links, runs and files of others into the folder of a checkpoint",
    "tests/unit/run/test_untracked_files.py": "it puts links, pipes and folders next to files of a checkpoint",
    "tests/unit/test_callback.py::test_a_call_that_is_not_due_reads_nothing": NAMES,
    "tests/unit/test_manager.py::test_existing_step_is_refused_without_overwrite": NAMES,
    "tests/unit/test_manager.py::test_history_records_what_each_save_cost": NAMES,
    "tests/unit/test_manager.py::test_path_of_step_can_be_loaded_and_verified": NAMES,
    "tests/unit/test_manager.py::test_paths_may_be_relative_or_start_with_tilde": "a URL is never relative",
    "tests/unit/test_unresponsive_disk.py": "it holds calls of a disk; the stand-in stalls requests elsewhere",
}


def reason_of(file: str, test: str) -> str | None:
    """Why a test applies to disks only; None: it applies to object stores, too."""
    return DISK_ONLY.get(file) or DISK_ONLY.get(f"{file}::{test}")
