"""A pytest plugin that puts `ElixirStrategy` in the place of the strategy that Fabric chooses for a single process.

Fabric asks for `launch` before `setup` under this strategy, and not under its own. The plugin calls it, without the
thread that looks after child processes every five seconds: there are none.
"""

import lightning_fabric.connector
from lightning_fabric import Fabric
from lightning_fabric.strategies.launchers import subprocess_script

from elixir_moe.hf.fabric import ElixirStrategy

_validate_launched = Fabric._validate_launched


def _launched(fabric: Fabric) -> None:
    if isinstance(fabric.strategy, ElixirStrategy) and fabric.world_size == 1:
        fabric.launch()
    _validate_launched(fabric)


setattr(lightning_fabric.connector, "SingleDeviceStrategy", lambda device: ElixirStrategy())  # noqa: B010
setattr(Fabric, "_validate_launched", _launched)  # noqa: B010
setattr(subprocess_script, "_launch_process_observer", lambda processes: None)  # noqa: B010
