"""The layers of the package from the top down, and what each of them may import or touch."""

# From the top down: a module imports only from its own folder and from lower lines.
LAYERS = (
    "__init__",
    "pytest_plugin",
    "cli",
    "report",
    "integrations",
    "testing",
    "callback",
    "loop",
    "config",
    "preemption",
    "manager",
    "inspection",
    "run",
    "tiers",
    "checkpoint",
    "opened",
    "transforms",
    "formats",
    "checkpointables",
    "checkpoint_metadata",
    "pytree",
    "distributed",
    "metrics",
    "pending",
    "exit_code",
    "store",
    "policies",
    "settings",
    "_validation",
    "errors",
)
# CORE: third-party packages of the layers. WITH_JAX: layers that may import jax. ADAPTERS: packages of single modules.
CORE = {"jax", "ml_dtypes", "msgspec", "numpy", "xxhash"}
WITH_JAX = {
    "__init__",
    "testing",
    "integrations",
    "callback",
    "loop",
    "manager",
    "run",
    "checkpoint",
    "checkpoint_metadata",
    "checkpointables",
    "pytree",
    "distributed",
}
ADAPTERS = {
    "blake3": {"store.manifest"},
    "bokeh": {"report.charts"},
    "cloudpickle": {"pytree.colocated.transfer"},
    "etils": {"integrations.orbax_items"},  # only for handlers of Orbax, which depends on it
    "flax": {"checkpointables.nnx"},
    "grain": {"checkpointables.grain"},
    "hydra": {"config", "integrations.hydra_search_path"},
    "jinja2": {"report.page"},
    "keras": {"integrations.keras"},
    "obstore": {"store.backends.objects"},
    "opentelemetry": {"metrics.exporters"},
    "orbax": {"integrations.orbax_items"},
    "prometheus_client": {"metrics.exporters"},
    "pytest": {"pytest_plugin"},
    "rich": {"run.goodput", "inspection.units"},
    "tensorstore": {"formats.tensorstore_reads"},
    "torch": {"formats.torch"},
    "typer": {"cli"},
    "yaml": {"cli.convert"},
}
# Code from a checkpoint must never run.
FORBIDDEN_STDLIB = {"marshal", "pickle", "shelve"}
MAY_READ_A_PICKLE = {"formats.torch_pickle": "PyTorch's metadata is a pickle, which is read as plain records"}
# Modules for the disk, which only the local backend touches.
DISK_STDLIB = {"glob", "shutil", "tempfile"}
FORBIDDEN_FILES = {"common.py", "helpers.py", "misc.py", "types.py", "util.py", "utils.py"}

MAY_TOUCH_THE_DISK = {
    "store.backends.local": "the backend of the disk",
    "store.backends.local_names": "the renames of the local backend",
    "store.backends.objects": "reads the variables of the environment that obstore reads; touches no disk",
    "cli.output": "keeps descriptors of closed standard streams in use; touches no data",
    "store.process_identity": "reads /proc, /sys and the environment about processes; touches no data",
    "distributed.shared_memory": "finds pipes and memory of other processes under /proc; touches no disk",
    "report.page": "reads the template, style and scripts of a page from the package; touches no data",
    "integrations.hydra_search_path": "looks up its own presets; touches no data",
    "testing.processes": "keeps the output and records of a proof in files, which are no checkpoint",
}
# What `Backend` has beyond `Storage`, because object stores have no such operation; and who uses it.
OF_FILE_SYSTEMS = {"rename", "exchange", "append", "touch", "point"}
MAY_USE_FILE_SYSTEMS = {
    "store.backends.local": "the backend of the disk",
    "store.backends.by_path": "passes on what is asked of a path",
    "store.backends.records": "records on file systems, which have no compare-and-swap",
    "store.transaction": "makes an attempt visible",
    "store.removal": "makes a checkpoint disappear",
    "run.retention": "makes a step disappear, and points a link to the best one",
    "run.record": "renames the notes of earlier versions",
    "run.history": "appends events",
    "report.page": "replaces the page of an earlier report",
    "inspection.disk_speed": "tries each operation of a file system",
}
# Names of `os` and `os.path` that touch no disk. `environ` is not allowed: no environment variable is a setting.
OS_WITHOUT_DISK = {"PathLike", "_exit", "cpu_count", "fspath", "getpid", "path", "register_at_fork", "sep", "strerror"}
OS_WITHOUT_DISK |= {"PRIO_PROCESS", "fsdecode", "fsencode", "killpg", "setpriority"}
OS_PATH_WITHOUT_DISK = {"abspath", "basename", "dirname", "expanduser", "isabs", "join", "normpath", "relpath", "split"}
PATH_METHODS_ON_DISK = set(
    "chmod exists glob hardlink_to is_dir is_file is_symlink iterdir lstat mkdir read_bytes read_text rglob rmdir "
    "symlink_to unlink write_bytes write_text".split()
)
NUMPY_ON_DISK = {"fromfile", "load", "memmap", "save", "savez", "savez_compressed"}

MOST_FILES_OF_A_FOLDER = 20
# A module that only one other module imports belongs in it, unless it is a subject of its own.
MAY_HAVE_ONE_IMPORTER = {
    "callback": "the public object, which users import",
    "exit_code": "how a process ends with an exit code; nothing about saves",
    "formats.detect": "the recognition of all formats; its other users import it when they need it",
    "formats.torch_pickle": "a reader of pickles as data, reviewed on its own for safety",
    "inspection.disk_speed": "the trials of a disk, of which doctor prints the results",
    "inspection.object_trials": "the trials of an object store, of which doctor prints the results",
    "integrations.orbax_items": "handlers of Orbax, apart from its manager",
    "pytree.colocated.host": "the part that runs on other hosts, which JAX finds by its name",
    "pytree.redistribution": "the exchange of shards between processes",
    "pytree.shared_reads": "the reads that the processes of a job share",
    "report.charts": "all that imports bokeh",
    "run.history_objects": "the history on object stores, which cannot append",
    "run.ownership": "what an owner holds and releases, apart from the list of steps",
    "run.scheduling": "which steps are saved; the manager is long enough without it",
    "run.restoring": "a restore of a run, by one process or by all processes of a job",
    "store.backends.objects": "the backend of object stores",
    "store.backends.records": "records on any file system; the memory backend of the tests needs them, too",
    "tiers.hosts": "the placement of copies and parity, which knows no files",
    "tiers.saving": "a save to the fast tier, next to the fast tier itself",
    "testing.causes": "the catalogue of causes of an inexact resume",
    "testing.resume_proof": "the public functions of the package testing",
}
