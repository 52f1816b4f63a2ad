-- The queue: two sorted sets, `queue` (waiting, by score) and `claims` (popped, by the time the claim
-- ends), and `queue-tokens`, the sum of the costs in both. The order is decided by place_of alone.

local function place_of(store, rec)
  local arrival = redis.call('INCR', store.prefix .. 'arrivals')
  redis.call('PEXPIRE', store.prefix .. 'arrivals', GENERATION_MS)
  return tonumber(rec.priority) * 2 ^ 40 + arrival
end

local function depth(store)
  local count = redis.call('ZCARD', store.prefix .. 'queue') + redis.call('ZCARD', store.prefix .. 'claims')
  return count, tonumber(redis.call('GET', store.prefix .. 'queue-tokens') or 0)
end

local function put_in_queue(store, rec)
  redis.call('ZADD', store.prefix .. 'queue', rec.place, rec.id)
  redis.call('PEXPIRE', store.prefix .. 'queue', ALIVE_MS)
  redis.call('PUBLISH', 'octavo:queued', table.concat({ rec.id, 'queued', rec.epoch, '' }, ' '))
end

local function enter_queue(store, rec)
  put_in_queue(store, rec)
  redis.call('INCRBY', store.prefix .. 'queue-tokens', rec.cost)
  redis.call('PEXPIRE', store.prefix .. 'queue-tokens', ALIVE_MS)
end

-- Forgets the sum when nothing waits: records that expired while they waited were not subtracted from it.
local function settle_tokens(store)
  if depth(store) == 0 then redis.call('DEL', store.prefix .. 'queue-tokens') end
end

local function leave_queue(store, rec)
  local left = redis.call('ZREM', store.prefix .. 'queue', rec.id) + redis.call('ZREM', store.prefix .. 'claims', rec.id)
  if left == 0 then return end
  redis.call('DECRBY', store.prefix .. 'queue-tokens', rec.cost)
  settle_tokens(store)
end
