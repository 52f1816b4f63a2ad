-- The members that are alive, and what any member may ask of all sequences.

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

-- Changes whenever `members` would reply otherwise than before, except when a lease ends: see there.
local function count_change(store, kind)
  redis.call('INCR', store.prefix .. 'changes:' .. kind)
  redis.call('PEXPIRE', store.prefix .. 'changes:' .. kind, GENERATION_MS)
end

-- KEYS: generation.  a: id, lease ms, kind, info, name or '', endpoint.
-- Reply: {'OK', 1 if the lease had ended, or never begun, else 0}; or as `register`, and then nothing was written
define('heartbeat', function(store, keys, id, lease_ms, kind, info, name, endpoint)
  lease_ms = tonumber(lease_ms)
  local held = (name or '') ~= '' and hold_name(store, id, lease_ms, kind, name, endpoint, false)
  if held then return held end
  local now, index, member = now_ms(), store.prefix .. 'members:' .. kind, store.prefix .. 'member:' .. id
  local lapsed = (tonumber(redis.call('ZSCORE', index, id) or 0)) <= now
  if lapsed or redis.call('GET', member) ~= info then count_change(store, kind) end
  local stop = now + lease_ms
  local heard = kind == 'worker' and redis.call('PUBLISH', store.prefix .. 'lifeline:' .. id, '') > 0
  local lease = string.format('%.0f %.0f %d', stop, lease_ms, heard and 1 or 0)
  redis.call('SET', store.prefix .. 'lease:' .. id, lease, 'PX', lease_ms + LEASE_LINGER_MS)
  note_lease_length(store, lease_ms)
  redis.call('SET', member, info, 'PX', lease_ms + LEASE_LINGER_MS)
  redis.call('ZADD', index, stop, id)
  redis.call('PEXPIRE', index, ALIVE_MS)
  redis.call('PEXPIRE', keys[1], GENERATION_MS)
  redis.call('PEXPIRE', store.prefix .. 'secret:resume', GENERATION_MS)
  if kind == 'worker' then renew_tail(store.prefix, id) end
  return { 'OK', lapsed and 1 or 0 }
end, true)

-- A worker that leaves has stopped on purpose, and its tombstone says so for as long as it may own sequences.
-- KEYS: generation.  a: id, kind, name or ''.  Reply: {'OK'}
define('leave', function(store, keys, id, kind, name)
  if kind == 'worker' then redis.call('SET', store.prefix .. 'left:' .. id, '1', 'PX', ALIVE_MS) end
  redis.call('DEL', store.prefix .. 'lease:' .. id, store.prefix .. 'member:' .. id)
  redis.call('ZADD', store.prefix .. 'members:' .. kind, 'XX', 0, id)  -- a sweep finds what is left of it
  count_change(store, kind)
  local key = name_key(store, kind, name or '')
  if string.match(redis.call('GET', key) or '', '^%d+ (%S+) ') == id then redis.call('DEL', key) end
  return { 'OK' }
end, true)

-- The members with a lease, and a version of that list. A lease that ends changes the number of members, everything else
-- the count of changes. Data that were lost, and with them changes, are data of another generation.
-- KEYS: generation.  a: kind, the version that the caller knows.
-- Reply: {'OK', version}; if it is another one, followed by id, info, id, info, ... in the order of ids
define('members', function(store, keys, kind, known)
  local index, now = store.prefix .. 'members:' .. kind, now_ms()
  local changes = redis.call('GET', store.prefix .. 'changes:' .. kind) or '0'
  local reply = { 'OK', store.generation .. ':' .. changes .. ':' .. redis.call('ZCOUNT', index, '(' .. now, '+inf') }
  if reply[2] == known then return reply end
  local ids = redis.call('ZRANGEBYSCORE', index, '(' .. now, '+inf')
  table.sort(ids)
  for _, id in ipairs(ids) do
    reply[#reply + 1], reply[#reply + 2] = id, redis.call('GET', store.prefix .. 'member:' .. id) or ''
  end
  return reply
end, true)

-- Which limits workers have had, by the time when one that has them was last seen.
-- KEYS: generation.  a: for how many ms they are remembered, the limits of workers that are there now.
-- Reply: {'OK', limits, ...}
define('limits', function(store, keys, kept_ms, ...)
  local key, now = store.prefix .. 'limits', now_ms()
  for _, limits in ipairs({ ... }) do redis.call('ZADD', key, now, limits) end
  redis.call('ZREMRANGEBYSCORE', key, '-inf', '(' .. string.format('%.0f', now - tonumber(kept_ms)))
  redis.call('PEXPIRE', key, math.max(ALIVE_MS, kept_ms))
  return { 'OK', unpack(redis.call('ZRANGE', key, 0, -1)) }
end, true)

-- KEYS: generation.  Reply: {'OK', number waiting for any model, their tokens, model, number waiting, their tokens, ...}
define('depth', function(store)
  local waiting, cost, reply = 0, 0, { 'OK', 0, 0 }
  for _, model in ipairs(queued_models(store)) do
    local t = totals(store, model)
    waiting, cost = waiting + t.count, cost + t.tokens
    reply[#reply + 1], reply[#reply + 2], reply[#reply + 3] = model, t.count, t.tokens
  end
  reply[2], reply[3] = waiting, cost
  return reply
end, true)

-- What routers know of models, by their names, for those that start while no worker of the model lives.
-- KEYS: generation.  a: name, description.  Reply: {'OK'}
define('describe', function(store, keys, name, description)
  redis.call('HSET', store.prefix .. 'models', name, description)
  redis.call('PEXPIRE', store.prefix .. 'models', GENERATION_MS)
  return { 'OK' }
end, true)

-- KEYS: generation.  Reply: {'OK', name, description, name, description, ...}
define('descriptions', function(store)
  local reply = { 'OK' }
  for i, text in ipairs(redis.call('HGETALL', store.prefix .. 'models')) do reply[i + 1] = text end
  return reply
end, true)

-- Prefixes and adapters that operators have named: a caller is told all of a kind, and only when they have changed.
local named = { prefixes = 'changes:prefix', adapters = 'changes:adapter' }

function named.put(store, kind, key, value, most)
  local all = store.prefix .. kind
  local is_new = not redis.call('HGET', all, key)
  if is_new and #redis.call('HGETALL', all) >= 2 * tonumber(most) then return { 'FULL' } end
  redis.call('HSET', all, key, value)
  redis.call('INCR', store.prefix .. named[kind])
  return { 'OK' }
end

function named.drop(store, kind, key)
  local dropped = redis.call('HDEL', store.prefix .. kind, key)
  if dropped == 1 then redis.call('INCR', store.prefix .. named[kind]) end
  return { 'OK', dropped }
end

-- Each reading keeps them for a month more.
function named.all(store, kind, known)
  local all, changes = store.prefix .. kind, store.prefix .. named[kind]
  redis.call('PEXPIRE', all, GENERATION_MS)
  redis.call('PEXPIRE', changes, GENERATION_MS)
  local reply = { 'OK', store.generation .. ':' .. (redis.call('GET', changes) or '0') }
  if reply[2] == known then return reply end
  for _, text in ipairs(redis.call('HGETALL', all)) do reply[#reply + 1] = text end
  return reply
end

-- KEYS: generation.  a: key, value, how many there may be.  Reply: {'OK'}; or {'FULL'}, and nothing was written
define('put_prefix', function(store, keys, ...) return named.put(store, 'prefixes', ...) end, true)
define('put_adapter', function(store, keys, ...) return named.put(store, 'adapters', ...) end, true)

-- KEYS: generation.  a: key.  Reply: {'OK', 1 if it was there}
define('drop_prefix', function(store, keys, ...) return named.drop(store, 'prefixes', ...) end, true)
define('drop_adapter', function(store, keys, ...) return named.drop(store, 'adapters', ...) end, true)

-- KEYS: generation.  a: the version that the caller knows.
-- Reply: {'OK', version}; if it is another one, followed by key, value, key, value, ...
define('prefixes', function(store, keys, ...) return named.all(store, 'prefixes', ...) end, true)
define('adapters', function(store, keys, ...) return named.all(store, 'adapters', ...) end, true)

-- For people who watch: it reads the accounts of all models with a queue. Their tenants are bounded by what may wait.
-- KEYS: generation.  a: how many tenants.
-- Reply: {'OK', number waiting, their tokens, number of tenants, tenant, number waiting, their tokens, ...}: those with
-- the most tokens first
define('tenant_depths', function(store, keys, limit)
  local waiting, cost, names, counts, tokens = 0, 0, {}, {}, {}
  for _, model in ipairs(queued_models(store)) do
    local flat = redis.call('HGETALL', accounts_of(store, model))
    for i = 1, #flat, 2 do
      local tenant = string.match(flat[i], '^n:(.*)$')
      if flat[i] == 'all' then
        local t = parse_totals(flat[i + 1])
        waiting, cost = waiting + t.count, cost + t.tokens
      elseif tenant then
        local list = numbers(flat[i + 1], 2)
        if not counts[tenant] then names[#names + 1], counts[tenant], tokens[tenant] = tenant, 0, 0 end
        counts[tenant], tokens[tenant] = counts[tenant] + list[1], tokens[tenant] + list[2]
      end
    end
  end
  table.sort(names, function(a, b) return tokens[a] > tokens[b] or (tokens[a] == tokens[b] and a < b) end)
  local reply = { 'OK', waiting, cost, #names }
  for i = 1, math.min(#names, tonumber(limit)) do
    local name = names[i]
    reply[#reply + 1], reply[#reply + 2], reply[#reply + 3] = name, counts[name], tokens[name]
  end
  return reply
end, true)

-- KEYS: generation.  a: name, 32 random bytes.  Reply: {'OK', the bytes that all processes share}
define('secret', function(store, keys, name, proposal)
  local key = store.prefix .. 'secret:' .. name
  redis.call('SET', key, proposal, 'NX')
  redis.call('PEXPIRE', key, GENERATION_MS)
  return { 'OK', redis.call('GET', key) }
end, true)

-- Live sequences by their rank in an index. Ranks change between calls, so several calls give no snapshot.
-- KEYS: generation.  a: first rank, count, owner or ''.  Reply: {'OK', 1 if there may be more, {id, fields, lengths}, ...}
define('list', function(store, keys, first, count, owner)
  local index = store.prefix .. (owner == '' and 'live' or 'owned:' .. owner)
  local ids = redis.call('ZRANGE', index, first, tonumber(first) + tonumber(count) - 1)
  local reply = { 'OK', #ids == tonumber(count) and 1 or 0 }
  for _, id in ipairs(ids) do
    local flat, lengths = described(fetch(record_key(store, id)))
    if flat then reply[#reply + 1] = { id, flat, lengths } end
  end
  return reply
end, true)

-- Ids whose records are gone leave the index: as long as the owner lives, no sweep looks there.
-- KEYS: generation.  a: owner, ids, joined.
-- Reply: {'OK', id, epoch, id, epoch, ...}: what it owns besides these, in the order of the queue
define('owned', function(store, keys, owner, besides)
  local reply, index, passed = { 'OK' }, 'owned:' .. owner, {}
  for id in string.gmatch(besides, '[^,]+') do passed[id] = true end
  for _, id in ipairs(redis.call('ZRANGE', store.prefix .. index, 0, -1)) do
    local state, epoch
    if not passed[id] then state, epoch = fetch_fields(record_key(store, id), 'state', 'epoch') end
    if state then reply[#reply + 1], reply[#reply + 2] = id, epoch
    elseif not passed[id] then drop_from_index(store, index, id) end
  end
  return reply
end, true)
