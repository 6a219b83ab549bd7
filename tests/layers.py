"""Where each module belongs: the layers from the top down, and what each of them may import or touch."""

# From the top down: a module imports only from its own folder and from lower lines.
LAYERS = (
    "__init__",
    "hydra_plugin",
    "pytest_plugin",
    "cli",
    "loops",
    "testing",
    "callback",
    "callback_parts",
    "resuming",
    "loop_forms",
    "goodput_table",
    "progress",
    "config",
    "config_notices",
    "config_nodes",
    "hydra_job",
    "report",
    "initial_state",
    "moving",
    "looking",
    "steps",
    "checkpoint",
    "checkpoint_metadata",
    "sources",
    "opened",
    "surgery",
    "checkpointables",
    "formats",
    "tree",
    "multihost",
    "jobs",
    "told_errors",
    "pending",
    "outcome",
    "unfinished",
    "exit_code",
    "notices",
    "sinks",
    "store",
    "settings",
    "value_checks",
    "errors",
)
# Which third parties a layer may import at all. What only adapters, or whole layers, may import is in ADAPTERS.
CORE = {"jax", "ml_dtypes", "msgspec", "numpy", "xxhash"}
WITH_JAX = {
    "__init__",
    "testing",
    "loops",
    "callback",
    "callback_parts",
    "resuming",
    "loop_forms",
    "goodput_table",
    "steps",
    "checkpoint",
}
WITH_JAX |= {"checkpoint_metadata", "checkpointables", "tree", "multihost"}
ADAPTERS = {
    "blake3": {"store.digests"},
    "bokeh": {
        "report.chart_frame",
        "report.charts_of_goodput",
        "report.charts_of_steps",
        "report.charts_of_time",
        "report.drawing",
    },
    "cloudpickle": {"tree.colocated_calls"},
    "etils": {"loops.orbax_handlers"},  # only for handlers of Orbax, which has it
    "flax": {"checkpointables.nnx_objects", "checkpointables.flax_legacy"},
    "grain": {"checkpointables.grain_iterator"},
    "hydra": {"config_nodes", "hydra_plugin"},
    "keras": {"loops.keras_callback", "loops.keras_data"},
    "opentelemetry": {"sinks.opentelemetry"},
    "orbax": {"loops.orbax_handlers"},
    "prometheus_client": {"sinks.prometheus"},
    "pytest": {"pytest_plugin"},
    "rich": {"goodput_table", "progress"},
    "tensorstore": {"formats.orbax_arrays", "formats.tensorstore_calls"},
    "torch": {"formats.torch_items"},
    "typer": {"cli"},
    "yaml": {"cli.operations"},
}
# Never: code from a checkpoint must not run. The second line is for the disk, which only store/local.py touches.
FORBIDDEN_STDLIB = {"marshal", "pickle", "shelve"}
MAY_READ_A_PICKLE = {
    "formats.torch_pickle": "PyTorch's metadata is one: it is read as records, and nothing else is made"
}
DISK_STDLIB = {"glob", "shutil", "tempfile"}
FORBIDDEN_FILES = {"base.py", "common.py", "helpers.py", "misc.py", "types.py", "util.py", "utils.py"}

MAY_TOUCH_THE_DISK = {
    "store.local": "it is the one that does",
    "store.local_names": "it is the part of store.local that renames",
    "cli.streams": "it keeps the numbers of standard streams that are closed, and touches no data",
    "store.file_system": "it asks of which kind and size a file system is, and touches no data",
    "notices.surroundings": "it tells facts of the environment, such as the Slurm job, and touches no disk",
    "store.huge_malloc": "it asks /sys about memory, and runs a command anew, and touches no data",
    "store.machine": "it asks /proc about processes, and touches no data",
    "store.mailbox": "it finds pipes of other processes under /proc, and touches no disk",
    "store.shared_memory": "it finds memory of other processes under /proc, and touches no disk",
    "report.page_files": "it reads the style and the scripts of a page, which lie beside it, and touches no data",
    "hydra_plugin": "it looks where its own presets lie, and touches no data",
    "testing.processes": "it has what the processes of a proof print in files, and ends them",
    "testing.record_files": "it has the records of a proof in a directory of their own; they are no checkpoint",
    "testing.run_target": "it looks whether the script of a proof is there",
}
# What of `os` and `os.path` touches no disk. `environ` is not here either: no environment variable is a knob.
OS_WITHOUT_DISK = {"PathLike", "_exit", "cpu_count", "fspath", "getpid", "path", "register_at_fork", "sep", "strerror"}
OS_WITHOUT_DISK |= {"PRIO_PROCESS", "fsdecode", "fsencode", "killpg", "setpriority"}
OS_PATH_WITHOUT_DISK = {"abspath", "basename", "dirname", "expanduser", "isabs", "join", "normpath", "relpath", "split"}
PATH_METHODS_ON_DISK = set(
    "chmod exists glob hardlink_to is_dir is_file is_symlink iterdir lstat mkdir read_bytes read_text rglob rmdir "
    "symlink_to unlink write_bytes write_text".split()
)
NUMPY_ON_DISK = {"fromfile", "load", "memmap", "save", "savez", "savez_compressed"}
