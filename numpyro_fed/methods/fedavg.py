"""Federated averaging (McMahan et al. 2017), and FedProx (Li et al. 2020): point estimates."""

from dataclasses import dataclass
from typing import Any

import optax

from numpyro_fed.local.descent import Task
from numpyro_fed.methods.averaging import Averaging, epoch
from numpyro_fed.methods.fedpa_posterior import PointPosterior
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey

LOCAL_STEPS = 10
ROUNDS, MOST_ROUNDS = 100, 1000  # by default; a cohort stands for all silos


@dataclass(frozen=True)
class FedAvg(Averaging):
    r"""Federated averaging: silos take steps on their own data, the server averages where they got to.

    With :math:`w_k` where silo k is after ``local_steps`` steps on its mean loss from the server's w,

    .. math:: w \leftarrow w - \eta \sum_k \frac{n_k}{n} (w - w_k)

    It is :class:`~numpyro_fed.FedPA` with the identity for the silos' covariances. With one local step it is gradient
    descent on the posterior; with many, and silos that differ, it stops at another point than the posterior's mode, and
    the further off the more steps silos take.

    Args:
        model: an ordinary NumPyro model without local latents, called as ``model(**silos[name])``.
        optim: the silos' optax optimiser, begun afresh at every visit. By default gradient steps of one over the
            largest curvature heard of (a fifth of that with minibatches), which silos find by power iteration at every
            visit; one that makes the loss rise is taken again, half as long.
        server_optim: the server's optax optimiser; the average of :math:`w - w_k` is its gradient. By default
            ``optax.sgd(1.0)``: the plain average.
        batch_size: rows of a silo that a step looks at, drawn anew each time with replacement. By default all.
        local_steps: steps of a silo in a round; by default 10, with minibatches as many as an epoch of the largest
            silo has.
        proximal: FedProx's mu: :math:`\tfrac{\mu}{2} |w - w_k|^2` is added to a silo's mean loss.
        prior: with the prior of the model, of which each silo's loss has its share; False for the likelihood alone.
        init_loc_fn: a NumPyro initialisation strategy (``init_to_sample``) for the globals; by default near zero.
        local, shared: names of sites or plates, where the automatic partition is to be overridden.

    ``fit.sample`` repeats the point; ``fit.params`` has the model's params (``flax`` modules by ``nnx_module``).

    Example:
        >>> fit = nf.FedAvg(model, batch_size=20, optim=optax.sgd(0.1)).run(jax.random.key(0), silos, 100)
        >>> fit.sample(jax.random.key(1), 1)["beta"].shape
        (1, 2)
    """

    def _rounds(self, sweep: int) -> int:
        return min(ROUNDS * sweep, MOST_ROUNDS)

    def posterior_of(self, split: SplitModel, survey: Survey) -> PointPosterior:
        return PointPosterior(split)

    def _steps(self, task: Task) -> int:
        return epoch(task, LOCAL_STEPS) if self.local_steps is None else self.local_steps

    def _server_default(self) -> Any:
        return optax.sgd(1.0)
