"""Federated averaging (McMahan et al. 2017), and FedProx (Li et al. 2020): point estimates."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optax

from numpyro_fed.algorithm import Left, Phase, Plan
from numpyro_fed.local.descent import Task
from numpyro_fed.methods.averaging import Averaging, Made, epoch
from numpyro_fed.methods.closing import OFF, Ascent, climb_phase, least_curvature
from numpyro_fed.methods.fedpa_posterior import DENSE, PointPosterior, around
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
        init_loc_fn: a NumPyro initialisation strategy (``init_to_sample``) for the globals; by default the posterior's
            mode, as far as ``start_rounds`` of Newton's method find it.
        start_rounds: at most so many rounds of mode finding before the first. With 0, above 200 dimensions, and where
            cohorts or stores leave silos out, the first point is near zero.
        last_look: one more round in which silos tell gradient and Hessian at the point (up to 200 dimensions, where
            every silo takes part). If the gradient is zero more than .2 posterior sds away, ``fit.verdict`` says so.
        local, shared: names of sites or plates, where the automatic partition is to be overridden.

    ``fit.sample`` repeats the point; ``fit.params`` has the model's params (``flax`` modules by ``nnx_module``). A
    point has no spread to be checked: its best verdict is ``"not checked"``.

    Example:
        >>> fit = nf.FedAvg(model, batch_size=20, optim=optax.sgd(0.1)).run(jax.random.key(0), silos, 100)
        >>> fit.sample(jax.random.key(1), 1)["beta"].shape
        (1, 2)
    """

    last_look: bool = True

    def _core(self) -> "FedAvg":
        return replace(self, start_rounds=0, last_look=False)

    def _rounds(self, sweep: int) -> int:
        return min(ROUNDS * sweep, MOST_ROUNDS)

    def posterior_of(self, split: SplitModel, survey: Survey) -> PointPosterior:
        return PointPosterior(split)

    def _steps(self, task: Task) -> int:
        return epoch(task, LOCAL_STEPS) if self.local_steps is None else self.local_steps

    def _server_default(self) -> Any:
        return optax.sgd(1.0)

    # --- how far from the mode ----------------------------------------------------------------------------------------

    def _checks(self, made: Made, plan: Plan) -> tuple[Phase, ...]:
        task = made.task
        if not self.last_look or plan.cohort is not None or not task.survey.known or task.flat.size > DENSE:
            return ()
        look = climb_phase("look", self._climbing(made), task, 1, lambda left, found: self._seen(task, left, found))
        return (look._replace(lacks="; how far its point is from the posterior's mode is not known"),)

    def _seen(self, task: Task, left: Left, found: Ascent) -> Left:
        _, flat = around(found.x, np.asarray(found.precision), least_curvature(left.server.z.dtype))
        size, steps, name = float(found.size), self._steps(task), type(self).__name__
        if flat:
            doubt = (
                f"{name}'s point is not near a mode: the posterior is flat, or curves upwards, in some direction "
                "there. Use nf.EP(model) or nf.SFVI(model), or give the parameters a prior that is narrower"
            )
        elif size > OFF:
            cure, _ = self._pulled(steps)
            doubt = f"{name}'s point is {size:.2g} posterior sds away from where the gradient is zero: {cure}"
        else:
            return left
        moving = not flat and self._pulled(steps)[1]
        return left._replace(reasons=(*left.reasons, doubt), moving=left.moving or moving)

    def _pulled(self, steps: int) -> tuple[str, bool]:
        """Why its point is elsewhere, with what to type; and whether more rounds would bring it nearer."""
        if steps == 1:
            return "run more rounds, or use nf.FedPA(model)", True
        return f"silos that take {steps} steps pull it there. Use nf.FedPA(model), or local_steps=1", False
