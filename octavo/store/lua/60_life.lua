-- The life of a sequence: it is accepted, waits, is read, and is attached to, detached from or cancelled by its client.

-- The mark of a sequence that was dropped before its time.
local function forgotten_of(store, id) return store.prefix .. 'forgotten:' .. id end

-- How long pictures are kept for a sequence that has not been accepted yet.
local UNACCEPTED_MS = 60 * 1000

-- Keeps a picture for a sequence that is about to be accepted: its life is then that of the prompt.
-- KEYS: generation, record.  a: digest, pixels.  Reply: {'OK', 0 if the sequence is there already, else 1}
define('keep_picture', function(_, keys, digest, pixels)
  if redis.call('EXISTS', keys[2]) == 1 then return { 'OK', 0 } end
  redis.call('HSET', keys[2] .. ':pictures', digest, pixels)
  redis.call('PEXPIRE', keys[2] .. ':pictures', UNACCEPTED_MS)
  return { 'OK', 1 }
end)

-- KEYS: generation, record.  a: digest.  Reply: {'OK', pixels, or '' if the picture is not kept}
define('picture', function(_, keys, digest)
  return { 'OK', redis.call('HGET', keys[2] .. ':pictures', digest) or '' }
end, true)

-- KEYS: generation, record.
-- a: cost, max requests, max tokens, max requests and max tokens of a tenant (0: no bound of its own), head start of a class
-- in tokens, deadline in ms or 0, branches, prompt (packed u32), the endpoint's notes, then the record's fixed fields and
-- values, pairwise. The field `quota`, where the tenant has one, is "<most streams> <tokens per minute>".
-- Reply: {OK | EXISTS | MISMATCH | FULL, number waiting, their tokens, of them of this tenant, their tokens,
-- the bound that is exceeded or '', tokens that leave the queue per second (0: not known), ms until a quota may have room}
local function accept(store, keys, cost, max_requests, max_tokens, tenant_requests, tenant_tokens, head_start, deadline_in,
                      branches, prompt, notes, ...)
  local rec = setmetatable({ key = keys[2], id = id_of(keys[2]) }, DEFAULTED)
  local fixed = { ... }
  for i = 1, #fixed, 2 do rec[fixed[i]] = fixed[i + 1] end
  cost, branches = tonumber(cost), tonumber(branches)
  local now, name, flow = now_ms(), 'n:' .. rec.tenant, flow_of(rec)
  local accounts = redis.call('HMGET', accounts_of(store, rec.model), 'all', name, flow)
  local t, tenant = parse_totals(accounts[1]), numbers(accounts[2], 2)
  local function reply(status, bound, retry_ms)
    return { status, t.count, t.tokens, tenant[1], tenant[2], bound, drain_rate(t, now), retry_ms or 0 }
  end
  local known = redis.call('HGET', rec.key, 'body_hash')
  if known then return reply(known == rec.body_hash and 'EXISTS' or 'MISMATCH', '') end
  if redis.call('EXISTS', forgotten_of(store, rec.id)) == 1 then return reply('MISMATCH', '') end
  local output = expected_output(rec, branches, t)
  local quota, retry_ms = quotas.exceeded(store, rec, output, now)
  if quota then return reply('FULL', quota, retry_ms) end
  local bound = exceeded_bound(t, tenant, cost, tonumber(max_requests), tonumber(max_tokens),
    tonumber(tenant_requests), tonumber(tenant_tokens))
  if bound then return reply('FULL', bound) end

  local account = charge_tenant(store, rec, branches, t, accounts[3], tonumber(head_start), t.count > tenant[1])
  for field, value in pairs({
    state = 'QUEUED', accepted_ms = now, cost = cost, charge = rec.charge, tag = rec.tag, place = rec.place, share = rec.share,
    quota = quotas.enter(store, rec, output, now),
    deadline_ms = deadline_in ~= '0' and now + tonumber(deadline_in) or nil,
    finishes = string.rep('0', branches), timeline = '0 queued ' .. rec.routers,
  }) do
    rec[field] = tostring(value)
    fixed[#fixed + 1], fixed[#fixed + 2] = field, value
  end
  redis.call('HSET', rec.key, unpack(fixed))
  redis.call('PEXPIRE', rec.key, ALIVE_MS)
  redis.call('SET', rec.key .. ':prompt', prompt, 'PX', ALIVE_MS)
  if rec.pictures ~= '' then redis.call('PEXPIRE', rec.key .. ':pictures', ALIVE_MS) end
  if notes ~= '' then redis.call('SET', rec.key .. ':notes', notes, 'PX', ALIVE_MS) end
  for branch = 0, branches - 1 do redis.call('SET', journal_of(rec.key, branch), '', 'PX', ALIVE_MS) end
  put_in_queue(store, rec)
  count_in(t, tenant, cost, now)
  keep_accounts(store, rec.model, not accounts[1], 'all', packed_totals(t), name, packed({ tenant[1], tenant[2] }), flow, account)
  give_to(store, rec, 'attached', 'router', rec.routers)
  add_to_index(store, 'live', now + ALIVE_MS / 2, rec.id)
  return reply('OK', '')
end

define('accept', accept)

-- The fields and values of a record, and the lengths of its journals; nil if there is none. `flat` is what `fetch` has
-- read, or else nil.
local function described(rec, flat)
  if not rec then return nil end
  local lengths = {}
  settle(rec.key)
  for branch = 0, #rec.finishes - 1 do lengths[branch + 1] = redis.call('STRLEN', journal_of(rec.key, branch)) / 4 end
  return flat or redis.call('HGETALL', rec.key), lengths
end

-- KEYS: generation.  a: model, count, claim ms, places that the workers have left, how many of these may be kept.
-- Reply: {'OK', now, {id, fields, lengths, prompt, journal, journal, ...}, ...}
define('pop', function(store, keys, model, count, claim_ms, places, most_kept)
  local now = now_ms()
  count, places, most_kept = tonumber(count), tonumber(places), tonumber(most_kept)
  local num_kept = most_kept > 0 and kept_places(totals(store, model), most_kept) or 0
  local reply = { 'OK', now }
  local queue = store.prefix .. 'queue:' .. model
  for _ = 1, count + MAX_EXPIRED_PER_POP do
    local id = redis.call('ZRANGE', queue, 0, 0)[1]
    if not id or #reply > 1 + count then break end
    local rec, flat = fetch(record_key(store, id))
    if not rec then
      redis.call('ZREM', queue, id)
      settle_accounts(store, model)
    elseif rec.deadline_ms ~= '0' and tonumber(rec.deadline_ms) <= now then
      finish(store, rec, -1, STOPPED.DEADLINE, nil, '')
    elseif num_kept > 0 and rec.share == 'over' and rec.epoch == '0' and places - (#reply - 2) <= num_kept then
      break  -- all that comes after it is over its share, too, but for what has a lower class
    else
      redis.call('ZREM', queue, id)
      add_to_index(store, 'claims:' .. model, now + tonumber(claim_ms), id)
      local entry = { id, described(rec, flat) }
      entry[4] = redis.call('GET', rec.key .. ':prompt') or ''
      for branch = 0, #rec.finishes - 1 do entry[5 + branch] = redis.call('GET', journal_of(rec.key, branch)) or '' end
      reply[#reply + 1] = entry
    end
  end
  return reply
end, true)

-- Puts a sequence back at its old place in the queue. A running one leaves its owner behind at the old epoch; a cancelled
-- one ends instead.
-- KEYS: generation, record.  a: epoch, why in a few words or ''.  Reply: {'OK', 1 if it waits now, else 0}
define('requeue', function(store, keys, epoch, seen)
  local rec = fetch(keys[2])
  if not rec or ended(rec) then return { 'OK', 0 } end
  local ahead = tonumber(rec.epoch) - tonumber(epoch)
  if rec.state == 'QUEUED' and (ahead == 0 or ahead == 1) then
    if redis.call('ZREM', store.prefix .. 'claims:' .. rec.model, rec.id) == 1 then put_in_queue(store, rec) end
    return { 'OK', 1 }
  end
  if ahead ~= 0 then return { 'OK', 0 } end
  if rec.cancel == '1' then
    finish(store, rec, -1, STOPPED.CANCELLED, nil, '')
    return { 'OK', 0 }
  end
  local now, left = now_ms(), rec.owner
  if rec.crashes ~= '0' then clear_quarantine(store, rec) end
  move_to_owner(store, rec, '')
  update(rec, {
    owner = '', state = 'QUEUED', epoch = tonumber(rec.epoch) + 1, take_id = '', mig_number = 0, mig_to = '',
    last_mig = 0, timeline = timeline_with(rec, now, with_seen('requeued ' .. left, seen)),
  })
  enter_queue(store, rec)
  notify(rec, 'queued')
  return { 'OK', 1 }
end, true)

-- KEYS: generation, record.  a: 1 for the prompt, then the first index wanted of each branch (none: no journals)
-- Reply: {'GONE'} or {'OK', fields, lengths, now, prompt, journal, journal, ...}
define('read', function(store, keys, want_prompt, ...)
  local rec, flat = fetch(keys[2])
  if not rec then return { 'GONE' } end
  local reply = { 'OK', described(rec, flat) }
  reply[4] = now_ms()
  reply[5] = want_prompt == '1' and redis.call('GET', rec.key .. ':prompt') or ''
  for i, first in ipairs({ ... }) do  -- `described` has settled the journals
    reply[5 + i] = redis.call('GETRANGE', rec.key .. ':' .. (i - 1), 4 * tonumber(first), -1)
  end
  return reply
end, true)

-- What the endpoint that took the request has written down, to show the answer again.
-- KEYS: generation, record.  Reply: {'OK', notes, or '' if there are none}
define('notes', function(_, keys)
  return { 'OK', redis.call('GET', keys[2] .. ':notes') or '' }
end, true)

-- Drops an ended sequence before its time. Its id is not free yet: a late repetition of `accept` must not begin it again.
-- KEYS: generation, record.  Reply: {'OK', 0 if it has not ended yet, else 1}
define('forget', function(store, keys)
  local rec = fetch(keys[2])
  if not rec then return { 'OK', 1 } end
  if not ended(rec) then return { 'OK', 0 } end
  drop_all(rec.key, #rec.finishes)
  redis.call('SET', forgotten_of(store, rec.id), '', 'PX', store.retain_ms)
  return { 'OK', 1 }
end, true)

-- Ends a waiting sequence. The owner of a running one is told at its next append.
local function cancel(store, rec)
  if rec.state == 'QUEUED' then
    finish(store, rec, -1, STOPPED.CANCELLED, nil, '')
  elseif rec.state == 'RUNNING' and rec.cancel == '0' then
    update(rec, { cancel = 1 })
    drop_from_index(store, 'detached', rec.id)
    note(rec, now_ms(), 'cancelled', rec.owner)
    notify(rec, 'cancelled')
  end
end

-- KEYS: generation, record.  Reply: {'GONE'} or {'OK', fields, lengths}
define('cancel', function(store, keys)
  local rec = fetch(keys[2])
  if not rec then return { 'GONE' } end
  cancel(store, rec)
  return { 'OK', described(rec) }
end, true)

-- Whether this router is among those that clients are attached to, and the others, joined.
local function split_routers(rec, router)
  local others, found = {}, false
  for other in string.gmatch(rec.routers, '[^,]+') do
    if other == router then found = true else others[#others + 1] = other end
  end
  return found, table.concat(others, ',')
end

-- KEYS: generation, record.  a: router.  Reply: {'GONE'} or {'OK', fields, lengths}
define('attach', function(store, keys, router)
  local rec = fetch(keys[2])
  if not rec then return { 'GONE' } end
  local found, others = split_routers(rec, router)
  if not ended(rec) and not found then
    update(rec, { routers = others == '' and router or others .. ',' .. router, detached_since_ms = 0 })
    give_to(store, rec, 'attached', 'router', router)
    drop_from_index(store, 'detached', rec.id)
  end
  return { 'OK', described(rec) }
end, true)

-- No router is attached any more, and the grace counts from `since` on.
local function begin_grace(store, rec, since)
  update(rec, { detached_since_ms = since })
  if rec.keep_on_disconnect == '0' and rec.cancel == '0' then add_to_index(store, 'detached', since, rec.id) end
end

-- Without this router. If it was the last one, the grace counts from `since` on.
local function detach(store, rec, router, since)
  local found, others = split_routers(rec, router)
  if ended(rec) or not found then return end
  drop_from_index(store, 'attached:' .. router, rec.id)
  update(rec, { routers = others })
  if others == '' then begin_grace(store, rec, since) end
end

-- Where no router is attached, a sweep may have detached this one, with a grace that begins later. It begins now: the
-- router lives, and says that the client has left. Otherwise the call does nothing if this router is not attached.
-- KEYS: generation, record.  a: router.  Reply: {'OK'}
define('detach', function(store, keys, router)
  local rec, now = fetch(keys[2]), now_ms()
  if rec and not ended(rec) and rec.routers == '' and tonumber(rec.detached_since_ms) > now then
    begin_grace(store, rec, now)
  elseif rec then
    detach(store, rec, router, now)
  end
  return { 'OK' }
end, true)
