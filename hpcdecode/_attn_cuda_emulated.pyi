"""The interface of _attn_cuda, on this machine's memory and cores."""

from hpcdecode._attn_cuda import CapacityError as CapacityError
from hpcdecode._attn_cuda import KvCache as KvCache
from hpcdecode._attn_cuda import LayerShape as LayerShape
from hpcdecode._attn_cuda import Recurrence as Recurrence
from hpcdecode._attn_cuda import RecurrentShape as RecurrentShape
from hpcdecode._attn_cuda import block_bytes as block_bytes
from hpcdecode._attn_cuda import device_count as device_count
from hpcdecode._attn_cuda import expand_weights as expand_weights
from hpcdecode._attn_cuda import layer_groups as layer_groups
from hpcdecode._attn_cuda import serves as serves
from hpcdecode._attn_cuda import serves_states as serves_states
