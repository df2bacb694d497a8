"""A server that has imported what runs need, for children that are forked from it: starting Python costs ten seconds.

multiprocessing has one such server a process, and it imports what was named last. So it is all named here.
"""

import multiprocessing

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([
    "qerl_lab.train.run", "qerl_lab.report.plots", "mlflow.tracking", "mlflow.store.tracking.sqlalchemy_store",
    "qerl_lab.evaluate.examination", "qerl_lab.quantize.quantize_model", "qerl_lab.tools.warmup_training",
])  # fmt: skip
