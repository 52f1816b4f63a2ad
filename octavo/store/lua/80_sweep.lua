-- The housekeeping that every router does for all routers. A sweep reads what is due, and nothing else.

local ROUTER_LOSS_MS = 30 * 1000  -- how much later the grace of a dead router's clients begins: they may not know it yet
local SWEEP_PAUSE_MS = 3000       -- a sweep that is later than this was missed, because no router lived

-- The first entries of an index with a score of at most `last`, whose records exist. The others leave the index.
local function due(store, name, last, limit)
  local found = {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', store.prefix .. name, '-inf', last, 'LIMIT', 0, limit)) do
    local rec = fetch(record_key(store, id))
    if rec then found[#found + 1] = rec else drop_from_index(store, name, id) end
  end
  return found
end

local function requeue_expired_claims(store, now, limit)
  local requeued = {}
  for _, model in ipairs(queued_models(store)) do
    local claims = 'claims:' .. model
    for _, rec in ipairs(due(store, claims, now, limit - #requeued)) do
      drop_from_index(store, claims, rec.id)
      put_in_queue(store, rec)
      requeued[#requeued + 1] = rec.id
    end
    settle_accounts(store, model)
  end
  return requeued
end

local function end_overdue(store, now, limit)
  local expired = {}
  for _, rec in ipairs(due(store, 'deadlines', now, limit)) do
    if ends_at(rec) > now then set_deadline(store, rec)
    else
      finish(store, rec, -1, STOPPED.DEADLINE, nil, '')
      expired[#expired + 1] = rec.id
    end
  end
  return expired
end

-- The members of a kind whose leases have ended and that have left entries in their index, the longest ended first. The
-- others are forgotten, a worker with its tail.
local function dead_members(store, kind, index, now)
  local members, dead = store.prefix .. 'members:' .. kind, {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', members, '-inf', now)) do
    if redis.call('EXISTS', store.prefix .. index .. ':' .. id) == 1 then dead[#dead + 1] = id
    else
      redis.call('ZREM', members, id)
      if kind == 'worker' then remove_tail(store.prefix, id) end
    end
  end
  return dead
end

-- Calls use(rec, member) for sequences that dead members have left behind. Each member has an equal share of `limit`, and at
-- least one also where there are more members than that: orphans that nobody can take, because no worker of their model
-- lives, keep none of another owner waiting.
local function each_left_behind(store, kind, index, now, limit, use)
  local dead = dead_members(store, kind, index, now)
  local share = math.max(1, math.floor(limit / #dead))
  for _, id in ipairs(dead) do
    for _, rec in ipairs(due(store, index .. ':' .. id, '+inf', share)) do use(rec, id) end
  end
end

local function cancel_abandoned(store, last, limit)
  local cancelled = {}
  for _, rec in ipairs(due(store, 'detached', last, limit)) do
    drop_from_index(store, 'detached', rec.id)
    cancel(store, rec)
    cancelled[#cancelled + 1] = rec.id
  end
  return cancelled
end

-- Renews the lives of the keys of live sequences, and of the indexes that these are in: an index lives for a day after its
-- last new entry, and a sequence may wait or run for longer. Nobody renews the tail of a worker that is dead.
local function renew_keys(store, now, limit)
  for _, rec in ipairs(due(store, 'live', now, limit)) do
    settle(rec.key)
    expire_all(rec, ALIVE_MS)
    if rec.state == 'QUEUED' then renew_queue(store, rec.model) else give_to(store, rec, 'owned', 'worker', rec.owner) end
    for router in string.gmatch(rec.routers, '[^,]+') do give_to(store, rec, 'attached', 'router', router) end
    set_deadline(store, rec)
    quotas.renew(store, rec, now)
    for _, name in ipairs({ 'detached', 'members:worker', 'members:router', 'accounts:' .. rec.model }) do
      redis.call('PEXPIRE', store.prefix .. name, ALIVE_MS)
    end
    add_to_index(store, 'live', now + ALIVE_MS / 2, rec.id)
  end
end

-- KEYS: generation.  a: limit (of each kind of work), grace ms, ms between two sweeps: a call that comes earlier does nothing
-- Reply: {'OK', {orphan, epoch, orphan, epoch, ...}, {requeued}, {cancelled}, {past their deadline}}
define('sweep', function(store, keys, limit, grace_ms, interval_ms)
  local now, orphans = now_ms(), {}
  limit, interval_ms = tonumber(limit), tonumber(interval_ms)
  local key, rested = store.prefix .. 'next-sweep', now - tonumber(grace_ms)
  local next_sweep, since = string.match(redis.call('GET', key) or '', '^(%d+) (%d+)$')
  if next_sweep and tonumber(next_sweep) > now then return { 'OK', {}, {}, {}, {} } end
  if interval_ms > 0 then
    if not next_sweep or now - tonumber(next_sweep) > SWEEP_PAUSE_MS then since = now end
    redis.call('SET', key, string.format('%.0f %.0f', now + interval_ms, since), 'PX', interval_ms + LEASE_LINGER_MS)
    if rested < tonumber(since) then rested = -1 end  -- for a while nobody could attach: that time is no grace
  end
  relieve_memory(store)
  local requeued = requeue_expired_claims(store, now, limit)
  local expired = end_overdue(store, now, limit)
  if store.frozen_until <= now then
    each_left_behind(store, 'router', 'attached', now, limit, function(rec, router)
      detach(store, rec, router, now + ROUTER_LOSS_MS)
    end)
    each_left_behind(store, 'worker', 'owned', now, limit, function(rec)
      orphans[#orphans + 1], orphans[#orphans + 2] = rec.id, rec.epoch
    end)
  end
  local cancelled = cancel_abandoned(store, rested, limit)
  renew_keys(store, now, limit)
  return { 'OK', orphans, requeued, cancelled, expired }
end, true)
