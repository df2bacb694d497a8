"""A fork server that has imported what runs need, because starting Python anew takes ten seconds.

multiprocessing has one such server per process and preloads only the last list given, so all modules are listed here.
"""

import multiprocessing

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([
    "qerl_lab.train.run", "qerl_lab.report.plots", "mlflow.tracking", "mlflow.store.tracking.sqlalchemy_store",
    "qerl_lab.evaluate.accuracy_run", "qerl_lab.quantize.quantize_model",
])  # fmt: skip
