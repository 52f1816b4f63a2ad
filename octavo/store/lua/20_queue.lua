-- The queue of a model: two sorted sets, `queue:<model>` (waiting, by place) and `claims:<model>` (popped, by the time the
-- claim ends), and `queue-tokens:<model>`, the sum of the costs in both. `queues` names the models with a queue that is
-- not empty. The order is decided by place_of alone.

local function place_of(store, rec)
  local arrival = redis.call('INCR', store.prefix .. 'arrivals')
  if arrival == 1 then redis.call('PEXPIRE', store.prefix .. 'arrivals', GENERATION_MS) end  -- heartbeats renew it
  return tonumber(rec.priority) * 2 ^ 40 + arrival
end

local function depth(store, model)
  local count = redis.call('ZCARD', store.prefix .. 'queue:' .. model) + redis.call('ZCARD', store.prefix .. 'claims:' .. model)
  return count, tonumber(redis.call('GET', store.prefix .. 'queue-tokens:' .. model) or 0)
end

-- The models with a queue that is not empty, in the order of their names.
local function queued_models(store)
  local models = redis.call('SMEMBERS', store.prefix .. 'queues')
  table.sort(models)
  return models
end

local function put_in_queue(store, rec)
  if add_to_index(store, 'queue:' .. rec.model, rec.place, rec.id) then
    redis.call('SADD', store.prefix .. 'queues', rec.model)
    redis.call('PEXPIRE', store.prefix .. 'queues', ALIVE_MS)
  else renew(store.prefix .. 'queues') end
  set_deadline(store, rec)
end

local function enter_queue(store, rec)
  put_in_queue(store, rec)
  local tokens = store.prefix .. 'queue-tokens:' .. rec.model
  if redis.call('INCRBY', tokens, rec.cost) == tonumber(rec.cost) then redis.call('PEXPIRE', tokens, ALIVE_MS) else renew(tokens) end
end

-- Renews the lives of the keys of a model's queue.
local function renew_queue(store, model)
  for _, name in ipairs({ 'queue:' .. model, 'claims:' .. model, 'queue-tokens:' .. model, 'queues' }) do
    redis.call('PEXPIRE', store.prefix .. name, ALIVE_MS)
  end
end

-- Forgets the sum when nothing waits: records that expired while they waited were not subtracted from it.
local function settle_tokens(store, model)
  if depth(store, model) > 0 then return end
  redis.call('DEL', store.prefix .. 'queue-tokens:' .. model)
  redis.call('SREM', store.prefix .. 'queues', model)
end

local function leave_queue(store, rec)
  local queue, claims = store.prefix .. 'queue:' .. rec.model, store.prefix .. 'claims:' .. rec.model
  if redis.call('ZREM', queue, rec.id) + redis.call('ZREM', claims, rec.id) == 0 then return end
  redis.call('DECRBY', store.prefix .. 'queue-tokens:' .. rec.model, rec.cost)
  settle_tokens(store, rec.model)
end
