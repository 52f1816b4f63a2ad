-- The queue of a shard: two sorted sets, `queue` (waiting, by score) and `claims` (popped, by the time the claim
-- ends), and `queue-tokens`, the sum of the costs in both. The order is decided by place_of alone.

local function place_of(shard, rec)
  local arrival = redis.call('INCR', shard.prefix .. 'arrivals')
  redis.call('PEXPIRE', shard.prefix .. 'arrivals', GENERATION_MS)
  return tonumber(rec.priority) * 2 ^ 40 + arrival
end

local function depth(shard)
  local count = redis.call('ZCARD', shard.prefix .. 'queue') + redis.call('ZCARD', shard.prefix .. 'claims')
  return count, tonumber(redis.call('GET', shard.prefix .. 'queue-tokens') or 0)
end

local function put_in_queue(shard, rec)
  redis.call('ZADD', shard.prefix .. 'queue', rec.place, rec.id)
  redis.call('PEXPIRE', shard.prefix .. 'queue', ALIVE_MS)
  redis.call('PUBLISH', 'octavo:queued', table.concat({ rec.id, 'queued', rec.epoch, '' }, ' '))
end

local function enter_queue(shard, rec)
  put_in_queue(shard, rec)
  redis.call('INCRBY', shard.prefix .. 'queue-tokens', rec.cost)
  redis.call('PEXPIRE', shard.prefix .. 'queue-tokens', ALIVE_MS)
end

-- Forgets the sum when nothing waits: records that expired while they waited were not subtracted from it.
local function settle_tokens(shard)
  if depth(shard) == 0 then redis.call('DEL', shard.prefix .. 'queue-tokens') end
end

local function leave_queue(shard, rec)
  local left = redis.call('ZREM', shard.prefix .. 'queue', rec.id) + redis.call('ZREM', shard.prefix .. 'claims', rec.id)
  if left == 0 then return end
  redis.call('DECRBY', shard.prefix .. 'queue-tokens', rec.cost)
  settle_tokens(shard)
end
