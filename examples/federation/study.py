"""Wheezing children: the study file that the server and every silo hold. It has a model, no data.

Whether child i wheezed in year t depends on the mother's smoking, the child's age and the child's own disposition b_i.
The coefficients beta and omega, the log precision (halved) of the dispositions, are shared; each b_i stays in its silo.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(smoke, age, wheeze=None):
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([4]).to_event(1))
    omega = numpyro.sample("omega", dist.Normal(0, 10))
    with numpyro.plate("children", smoke.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, jnp.exp(-omega)))
        smoke = smoke[:, None]
        logits = beta[0] + beta[1] * smoke + beta[2] * age + beta[3] * smoke * age + b[:, None]
        numpyro.sample("wheeze", dist.Bernoulli(logits=logits).to_event(1), obs=wheeze)


name = "six cities"
shared = dict(age=np.array([-2.0, -1.0, 0.0, 1.0], np.float32))  # years, centred at nine
methods = {"EP": nf.EP(model), "SFVI": nf.SFVI(model)}
columns = {
    "smoke": {"column": "smoke", "as": "float"},  # 0 or 1, also where a file has whole numbers only
    "wheeze": ["wheeze_7", "wheeze_8", "wheeze_9", "wheeze_10"],
}
