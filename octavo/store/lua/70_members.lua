-- The members that are alive, and the housekeeping that every router does for all routers.

-- KEYS: generation.  a: id, lease ms, kind, info; kind '' on all shards but the first.  Reply: {'OK', generation}
define('heartbeat', function(shard, keys, id, lease_ms, kind, info)
  lease_ms = tonumber(lease_ms)
  local stop = now_ms() + lease_ms
  redis.call('SET', shard.prefix .. 'lease:' .. id, string.format('%.0f', stop), 'PX', lease_ms + LEASE_LINGER_MS)
  redis.call('PEXPIRE', keys[1], GENERATION_MS)
  if kind ~= '' then
    redis.call('SET', shard.prefix .. 'member:' .. id, info, 'PX', lease_ms + LEASE_LINGER_MS)
    redis.call('ZADD', shard.prefix .. 'members:' .. kind, stop, id)
    redis.call('PEXPIRE', shard.prefix .. 'members:' .. kind, ALIVE_MS)
  end
  return { 'OK', shard.generation }
end, true)

-- KEYS: generation.  a: id, kind.  Reply: {'OK'}
define('leave', function(shard, keys, id, kind)
  redis.call('DEL', shard.prefix .. 'lease:' .. id, shard.prefix .. 'member:' .. id)
  redis.call('ZREM', shard.prefix .. 'members:' .. kind, id)
  return { 'OK' }
end, true)

-- KEYS: generation.  a: kind.  Reply: {'OK', id, info, id, info, ...} in the order of ids
define('members', function(shard, keys, kind)
  local index = shard.prefix .. 'members:' .. kind
  redis.call('ZREMRANGEBYSCORE', index, '-inf', now_ms())
  local ids = redis.call('ZRANGE', index, 0, -1)
  table.sort(ids)
  local reply = { 'OK' }
  for _, id in ipairs(ids) do
    reply[#reply + 1], reply[#reply + 2] = id, redis.call('GET', shard.prefix .. 'member:' .. id) or ''
  end
  return reply
end, true)

-- KEYS: generation.  Reply: {'OK', number waiting, their tokens}
define('depth', function(shard) return { 'OK', depth(shard) } end, true)

-- KEYS: generation.  a: name, 32 random bytes.  Reply: {'OK', the bytes that all processes share}
define('secret', function(shard, keys, name, proposal)
  local key = shard.prefix .. 'secret:' .. name
  redis.call('SET', key, proposal, 'NX')
  redis.call('PEXPIRE', key, GENERATION_MS)
  return { 'OK', redis.call('GET', key) }
end, true)

-- Live sequences by their rank in `live`. Ranks change between calls, so several calls give no snapshot.
-- KEYS: generation.  a: first rank, count, owner or ''.  Reply: {'OK', 1 if there may be more, {id, fields, lengths}, ...}
define('list', function(shard, keys, first, count, owner)
  local ids = redis.call('ZRANGE', shard.prefix .. 'live', first, tonumber(first) + tonumber(count) - 1)
  local reply = { 'OK', #ids == tonumber(count) and 1 or 0 }
  for _, id in ipairs(ids) do
    local rec = fetch(record_key(shard, id))
    if rec and (owner == '' or rec.owner == owner) then
      local entry = described(rec)
      reply[#reply + 1] = { id, entry[2], entry[3] }
    end
  end
  return reply
end, true)

local function requeue_expired_claims(shard, now, limit)
  local claims, requeued = shard.prefix .. 'claims', {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', claims, '-inf', now, 'LIMIT', 0, limit)) do
    local rec = fetch(record_key(shard, id))
    redis.call('ZREM', claims, id)
    if rec then
      put_in_queue(shard, rec)
      requeued[#requeued + 1] = id
    else
      settle_tokens(shard)
    end
  end
  return requeued
end

-- Whether no client was attached for the grace. A router without a lease counts as gone from the moment this is seen. If
-- its lease comes back, so does the attachment.
local function abandoned(shard, rec, now, grace_ms)
  local since = tonumber(rec.detached_since_ms)
  if rec.router ~= '' and shard.frozen_until <= now then
    local alive = lease_alive(shard, rec.router, now)
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
define('sweep', function(shard, keys, limit, grace_ms)
  local now, live = now_ms(), shard.prefix .. 'live'
  local orphans, cancelled, expired = {}, {}, {}
  grace_ms = tonumber(grace_ms)
  local requeued = requeue_expired_claims(shard, now, limit)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', live, '-inf', now, 'LIMIT', 0, limit)) do
    local rec = fetch(record_key(shard, id))
    if not rec then
      redis.call('ZREM', live, id)
    elseif rec.state == 'QUEUED' and rec.deadline_ms ~= '0' and tonumber(rec.deadline_ms) <= now then
      finish(shard, rec, -1, STOPPED.DEADLINE, nil, '')
      expired[#expired + 1] = id
    else
      if abandoned(shard, rec, now, grace_ms) and rec.cancel == '0' then
        cancel(shard, rec)
        cancelled[#cancelled + 1] = id
      end
      if not ended(rec) then
        redis.call('ZADD', live, next_check(rec, now, grace_ms), id)
        if redis.call('PTTL', rec.key) < ALIVE_MS / 2 then expire_all(rec, ALIVE_MS) end
        if rec.state == 'RUNNING' and shard.frozen_until <= now and not lease_alive(shard, rec.owner, now) then
          orphans[#orphans + 1], orphans[#orphans + 2] = id, rec.epoch
        end
      end
    end
  end
  return { 'OK', orphans, requeued, cancelled, expired }
end, true)
