-- The members that are alive, and the housekeeping that every router does for all routers.

local function name_key(store, kind, name) return store.prefix .. 'name:' .. kind .. ':' .. name end

-- Gives a member the name until its lease ends. If another member has it until then, the reply {'HELD', ...} says which.
-- A member that has just started at the endpoint of the other one gets the name: the other one cannot listen there.
local function hold_name(store, id, lease_ms, kind, name, endpoint, starts)
  local now, key = now_ms(), name_key(store, kind, name)
  local stop, holder, place = string.match(redis.call('GET', key) or '', '^(%d+) (%S+) (.*)$')
  if stop and tonumber(stop) > now and holder ~= id and not (starts and place == endpoint) then
    return { 'HELD', holder, place, stop }
  end
  local value = string.format('%.0f %s %s', now + lease_ms, id, endpoint)
  redis.call('SET', key, value, 'PX', lease_ms + LEASE_LINGER_MS)
  return nil
end

-- KEYS: generation.  a: id, lease ms, kind, name, endpoint.
-- Reply: {'OK'}; or {'HELD', id, endpoint, end of its lease} of the member that has the name
define('register', function(store, keys, id, lease_ms, kind, name, endpoint)
  return hold_name(store, id, tonumber(lease_ms), kind, name, endpoint, true) or { 'OK' }
end, true)

-- Remembers the longest lease of the last day, by which take-overs freeze after a restart.
local function note_lease_length(store, lease_ms)
  local key = store.prefix .. 'longest-lease'
  if lease_ms >= tonumber(redis.call('GET', key) or 0) then redis.call('SET', key, lease_ms, 'PX', ALIVE_MS) end
end

-- KEYS: generation.  a: id, lease ms, kind, info, name or '', endpoint.
-- Reply: {'OK', generation}; or as `register`, and then nothing was written
define('heartbeat', function(store, keys, id, lease_ms, kind, info, name, endpoint)
  lease_ms = tonumber(lease_ms)
  local held = (name or '') ~= '' and hold_name(store, id, lease_ms, kind, name, endpoint, false)
  if held then return held end
  local stop = now_ms() + lease_ms
  local lease = string.format('%.0f %.0f', stop, lease_ms)
  redis.call('SET', store.prefix .. 'lease:' .. id, lease, 'PX', lease_ms + LEASE_LINGER_MS)
  note_lease_length(store, lease_ms)
  redis.call('PEXPIRE', keys[1], GENERATION_MS)
  redis.call('SET', store.prefix .. 'member:' .. id, info, 'PX', lease_ms + LEASE_LINGER_MS)
  redis.call('ZADD', store.prefix .. 'members:' .. kind, stop, id)
  redis.call('PEXPIRE', store.prefix .. 'members:' .. kind, ALIVE_MS)
  return { 'OK', store.generation }
end, true)

-- A worker that leaves has stopped on purpose, and its tombstone says so for as long as it may own sequences.
-- KEYS: generation.  a: id, kind, name or ''.  Reply: {'OK'}
define('leave', function(store, keys, id, kind, name)
  if kind == 'worker' then redis.call('SET', store.prefix .. 'left:' .. id, '1', 'PX', ALIVE_MS) end
  redis.call('DEL', store.prefix .. 'lease:' .. id, store.prefix .. 'member:' .. id)
  redis.call('ZREM', store.prefix .. 'members:' .. kind, id)
  local key = name_key(store, kind, name or '')
  if string.match(redis.call('GET', key) or '', '^%d+ (%S+) ') == id then redis.call('DEL', key) end
  return { 'OK' }
end, true)

-- KEYS: generation.  a: kind.  Reply: {'OK', id, info, id, info, ...} in the order of ids
define('members', function(store, keys, kind)
  local index = store.prefix .. 'members:' .. kind
  redis.call('ZREMRANGEBYSCORE', index, '-inf', now_ms())
  local ids = redis.call('ZRANGE', index, 0, -1)
  table.sort(ids)
  local reply = { 'OK' }
  for _, id in ipairs(ids) do
    reply[#reply + 1], reply[#reply + 2] = id, redis.call('GET', store.prefix .. 'member:' .. id) or ''
  end
  return reply
end, true)

-- KEYS: generation.  Reply: {'OK', number waiting, their tokens}
define('depth', function(store) return { 'OK', depth(store) } end, true)

-- KEYS: generation.  a: name, 32 random bytes.  Reply: {'OK', the bytes that all processes share}
define('secret', function(store, keys, name, proposal)
  local key = store.prefix .. 'secret:' .. name
  redis.call('SET', key, proposal, 'NX')
  redis.call('PEXPIRE', key, GENERATION_MS)
  return { 'OK', redis.call('GET', key) }
end, true)

-- Live sequences by their rank in `live`. Ranks change between calls, so several calls give no snapshot.
-- KEYS: generation.  a: first rank, count, owner or ''.  Reply: {'OK', 1 if there may be more, {id, fields, lengths}, ...}
define('list', function(store, keys, first, count, owner)
  local ids = redis.call('ZRANGE', store.prefix .. 'live', first, tonumber(first) + tonumber(count) - 1)
  local reply = { 'OK', #ids == tonumber(count) and 1 or 0 }
  for _, id in ipairs(ids) do
    local rec = fetch(record_key(store, id))
    if rec and (owner == '' or rec.owner == owner) then
      local entry = described(rec)
      reply[#reply + 1] = { id, entry[2], entry[3] }
    end
  end
  return reply
end, true)

local function requeue_expired_claims(store, now, limit)
  local claims, requeued = store.prefix .. 'claims', {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', claims, '-inf', now, 'LIMIT', 0, limit)) do
    local rec = fetch(record_key(store, id))
    redis.call('ZREM', claims, id)
    if rec then
      put_in_queue(store, rec)
      requeued[#requeued + 1] = id
    else
      settle_tokens(store)
    end
  end
  return requeued
end

-- Whether no client was attached for the grace. A router without a lease counts as gone from the moment this is seen. If
-- its lease comes back, so does the attachment.
local function abandoned(store, rec, now, grace_ms)
  local since = tonumber(rec.detached_since_ms)
  if rec.router ~= '' and store.frozen_until <= now then
    local alive = lease_alive(store, rec.router, now)
    if alive and since > 0 then since = 0 elseif not alive and since == 0 then since = now end
    if since ~= tonumber(rec.detached_since_ms) then update(rec, { detached_since_ms = since }) end
  end
  return since > 0 and now - since >= grace_ms and rec.keep_on_disconnect == '0'
end

local function next_check(rec, now, grace_ms)
  local at = now + CHECK_MS
  if rec.state == 'QUEUED' and rec.deadline_ms ~= '0' then at = math.min(at, tonumber(rec.deadline_ms)) end
  local since = tonumber(rec.detached_since_ms)
  if since > 0 and since + grace_ms > now then at = math.min(at, since + grace_ms) end
  return at
end

-- KEYS: generation.  a: limit, grace ms.
-- Reply: {'OK', {orphan, epoch, orphan, epoch, ...}, {requeued}, {cancelled}, {past their deadline}}
define('sweep', function(store, keys, limit, grace_ms)
  local now, live = now_ms(), store.prefix .. 'live'
  local orphans, cancelled, expired = {}, {}, {}
  grace_ms = tonumber(grace_ms)
  local requeued = requeue_expired_claims(store, now, limit)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', live, '-inf', now, 'LIMIT', 0, limit)) do
    local rec = fetch(record_key(store, id))
    if not rec then
      redis.call('ZREM', live, id)
    elseif rec.state == 'QUEUED' and rec.deadline_ms ~= '0' and tonumber(rec.deadline_ms) <= now then
      finish(store, rec, -1, STOPPED.DEADLINE, nil, '')
      expired[#expired + 1] = id
    else
      if abandoned(store, rec, now, grace_ms) and rec.cancel == '0' then
        cancel(store, rec)
        cancelled[#cancelled + 1] = id
      end
      if not ended(rec) then
        redis.call('ZADD', live, next_check(rec, now, grace_ms), id)
        if redis.call('PTTL', rec.key) < ALIVE_MS / 2 then expire_all(rec, ALIVE_MS) end
        if rec.state == 'RUNNING' and store.frozen_until <= now and not lease_alive(store, rec.owner, now) then
          orphans[#orphans + 1], orphans[#orphans + 2] = id, rec.epoch
        end
      end
    end
  end
  return { 'OK', orphans, requeued, cancelled, expired }
end, true)
