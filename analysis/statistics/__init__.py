"""What seeds say together: paired tests, intervals over seeds, several criteria at once.

The seed is the unit of repetition: tokens of one seed share a batch and an update and are
not independent. An undefined statistic is NaN, never an exception or a warning.
"""

from .cluster import CLUSTER_METHOD as CLUSTER_METHOD
from .cluster import PooledDifference as PooledDifference
from .cluster import pooled_difference as pooled_difference
from .intervals import METHOD as METHOD
from .intervals import METHODS as METHODS
from .intervals import RESAMPLES as RESAMPLES
from .intervals import bootstrap_mean as bootstrap_mean
from .intervals import bootstrap_ratio as bootstrap_ratio
from .multiple import holm as holm
from .paired import Paired as Paired
from .paired import compare_paired as compare_paired
from .seeds import LEVEL as LEVEL
from .seeds import UNDEFINED as UNDEFINED
from .seeds import Interval as Interval
from .seeds import mean as mean
from .signed import FLIPS as FLIPS
from .signed import permutation_test as permutation_test
from .signed import sign_test as sign_test
from .signed import wilcoxon_test as wilcoxon_test
