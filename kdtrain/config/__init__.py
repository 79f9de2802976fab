"""Every option of every command, as frozen dataclasses: one field is one flag, one TOML key and one line of `--help`.

A command's configuration is a dataclass whose fields are either options or sections (dataclasses of options). Flags
are flat: `--lr` is `optimizer.lr`, and a TOML file has it as `lr` under `[optimizer]`. `__post_init__` refuses values
that cannot work, by a `UsageError` that names the option; the command that opens the cache or the model refuses what
depends on those. Nothing heavy is imported here, so that `--help` is instant.
"""
