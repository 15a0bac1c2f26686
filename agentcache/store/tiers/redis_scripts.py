"""What the Redis tier changes on the server, each change one script that runs alone there: all of it happens, or nothing.

Keys, after the prefix. `<name>` is a version's name, `<key>` an object's.

```
v:<name>         hash    manifest · info (a listing's line) · keys (of its objects) · cost
o:<key>          hash    holders · bytes · tag · ranks · owner (the tenant, hashed) · entry (as in the manifest)
b:<key>:<rank>   hash    b (payload) · c (its checksum); expires while its save is open
t:<ticket>       hash    an open save: draft · keep · new · own · reserve · ranks · put · p:<key>:<rank> (checksum)
score, order     zsets   versions by last use and hints, and by creation
tickets          zset    open saves by deadline, in the server's seconds
clock, seq       counters of uses and of versions
sums, tags       hashes  used · reserved · objects · evictions, and bytes by tag
```
"""

from __future__ import annotations

__all__ = ["ABORT", "ADMIT", "COMPLETE", "DELETE", "FIND", "HINT", "PREPARE", "REAP"]

_PRELUDE = """
local P = KEYS[1]
local call = redis.call

local function words(text)
  local out = {}
  for word in string.gmatch(text or '', '%S+') do out[#out + 1] = word end
  return out
end

local function add(what, number)
  call('HINCRBY', P .. 'sums', what, string.format('%.0f', number))
end

local function release(key)
  if call('HINCRBY', P .. 'o:' .. key, 'holders', -1) > 0 then return end
  local m = call('HMGET', P .. 'o:' .. key, 'bytes', 'tag', 'ranks')
  if m[1] then
    add('used', -m[1])
    add('objects', -1)
    if call('HINCRBY', P .. 'tags', m[2], '-' .. m[1]) <= 0 then call('HDEL', P .. 'tags', m[2]) end
    for rank = 0, m[3] - 1 do call('UNLINK', P .. 'b:' .. key .. ':' .. rank) end
  end
  call('UNLINK', P .. 'o:' .. key)
end

local function drop_version(name)
  local v = call('HMGET', P .. 'v:' .. name, 'keys', 'cost')
  call('ZREM', P .. 'score', name)
  call('ZREM', P .. 'order', name)
  call('UNLINK', P .. 'v:' .. name)
  if v[2] then
    add('used', -v[2])
    for _, key in ipairs(words(v[1])) do release(key) end
  end
end

local function end_save(ticket, forget)
  local t = call('HMGET', P .. 't:' .. ticket, 'own', 'keep', 'new', 'ranks')
  call('ZREM', P .. 'tickets', ticket)
  if not t[1] then return 0 end
  add('used', -t[1])
  add('reserved', -t[1])
  call('UNLINK', P .. 't:' .. ticket)
  for _, key in ipairs(words(t[2])) do release(key) end
  if forget then
    for _, key in ipairs(words(t[3])) do
      if call('EXISTS', P .. 'o:' .. key) == 0 then
        for rank = 0, t[4] - 1 do call('UNLINK', P .. 'b:' .. key .. ':' .. rank) end
      end
    end
  end
  return 1
end

local function now() return tonumber(call('TIME')[1]) end

local function reap()
  local ended = 0
  for _, ticket in ipairs(call('ZRANGEBYSCORE', P .. 'tickets', '-inf', now())) do
    ended = ended + end_save(ticket, true)
  end
  return ended
end
"""

PREPARE = (
    _PRELUDE
    + """
-- ARGV: name, ticket, draft, own, budget, seconds, policy's zset, owner, ranks, reserve, new, keep, entries of keep
local name, ticket, own, budget = ARGV[1], ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5])
reap()
if call('EXISTS', P .. 'v:' .. name) == 1 then return {'exists', ''} end
for _, key in ipairs(words(ARGV[11])) do
  if call('EXISTS', P .. 'o:' .. key) == 1 then return {'used', key} end
end
local keep, entries = words(ARGV[12]), words(ARGV[13])
for i, key in ipairs(keep) do
  local o = call('HMGET', P .. 'o:' .. key, 'owner', 'entry')
  if not o[1] or o[1] ~= ARGV[8] then return {'gone', key} end
  if o[2] ~= entries[i] then return {'other', key} end
end
local pinned, seen = own + tonumber(call('HGET', P .. 'sums', 'reserved') or 0), {}
local function pin(keys)
  for _, key in ipairs(keys) do
    if not seen[key] then
      seen[key] = true
      pinned = pinned + tonumber(call('HGET', P .. 'o:' .. key, 'bytes') or 0)
    end
  end
end
pin(keep)
for _, other in ipairs(call('ZRANGE', P .. 'tickets', 0, -1)) do pin(words(call('HGET', P .. 't:' .. other, 'keep'))) end
if pinned > budget then return {'full', string.format('%.0f', pinned - own)} end
call('HSET', P .. 't:' .. ticket, 'draft', ARGV[3], 'own', ARGV[4], 'new', ARGV[11], 'keep', ARGV[12], 'ranks', ARGV[9],
     'reserve', ARGV[10], 'put', 0)
call('ZADD', P .. 'tickets', now() + tonumber(ARGV[6]), ticket)
for _, key in ipairs(keep) do call('HINCRBY', P .. 'o:' .. key, 'holders', 1) end
add('used', own)
add('reserved', own)
while tonumber(call('HGET', P .. 'sums', 'used')) > budget do
  local victim = call('ZRANGE', P .. ARGV[7], 0, 0)[1]
  if not victim then break end
  drop_version(victim)
  add('evictions', 1)
end
return {'ok', ''}
"""
)

ADMIT = (
    _PRELUDE
    + """
-- ARGV: ticket, key, rank, size, checksum. Says whether a payload may be put, before it is sent.
local t = P .. 't:' .. ARGV[1]
local d = call('HMGET', t, 'new', 'ranks', 'reserve', 'put')
if not d[1] then return 'closed' end
if tonumber(ARGV[3]) >= tonumber(d[2]) or tonumber(ARGV[3]) < 0 then return 'stray' end
if not string.find(d[1], ARGV[2], 1, true) then return 'stray' end
local field = 'p:' .. ARGV[2] .. ':' .. ARGV[3]
local old = call('HGET', t, field)
if old then return old == ARGV[5] and 'ok' or 'other' end
if d[4] + ARGV[4] > tonumber(d[3]) then return 'full' end
call('HSET', t, field, ARGV[5])
call('HINCRBY', t, 'put', ARGV[4])
return 'ok'
"""
)

COMPLETE = (
    _PRELUDE
    + """
-- ARGV: ticket, name, manifest, info, cost, sequence, owner, all keys, then of each new object:
--       key, bytes, tag, ranks, entry, checksums
local ticket, name = ARGV[1], ARGV[2]
if call('EXISTS', P .. 't:' .. ticket) == 0 then return {'closed', ''} end
if call('EXISTS', P .. 'v:' .. name) == 1 then return {'exists', ''} end
for i = 9, #ARGV, 6 do
  if call('EXISTS', P .. 'o:' .. ARGV[i]) == 1 then return {'used', ARGV[i]} end
  for rank, checksum in ipairs(words(ARGV[i + 5])) do
    if call('HGET', P .. 'b:' .. ARGV[i] .. ':' .. (rank - 1), 'c') ~= checksum then return {'missing', ARGV[i]} end
  end
end
for i = 9, #ARGV, 6 do
  call('HSET', P .. 'o:' .. ARGV[i], 'holders', 0, 'bytes', ARGV[i + 1], 'tag', ARGV[i + 2], 'ranks', ARGV[i + 3],
       'entry', ARGV[i + 4], 'owner', ARGV[7])
  for rank = 0, ARGV[i + 3] - 1 do call('PERSIST', P .. 'b:' .. ARGV[i] .. ':' .. rank) end
  add('used', tonumber(ARGV[i + 1]))
  add('objects', 1)
  call('HINCRBY', P .. 'tags', ARGV[i + 2], ARGV[i + 1])
end
for _, key in ipairs(words(ARGV[8])) do call('HINCRBY', P .. 'o:' .. key, 'holders', 1) end
call('HSET', P .. 'v:' .. name, 'manifest', ARGV[3], 'info', ARGV[4], 'cost', ARGV[5], 'keys', ARGV[8])
call('ZADD', P .. 'score', call('INCR', P .. 'clock'), name)
call('ZADD', P .. 'order', ARGV[6], name)
add('used', tonumber(ARGV[5]))
end_save(ticket, false)
return {'ok', ''}
"""
)

ABORT = _PRELUDE + "return end_save(ARGV[1], true)"

FIND = (
    _PRELUDE
    + """
local manifest = call('HGET', P .. 'v:' .. ARGV[1], 'manifest')
if manifest then
  local use, score = call('INCR', P .. 'clock'), call('ZSCORE', P .. 'score', ARGV[1])
  if not score or tonumber(score) < use then call('ZADD', P .. 'score', use, ARGV[1]) end
end
return manifest
"""
)

HINT = (
    _PRELUDE
    + """
if call('EXISTS', P .. 'v:' .. ARGV[1]) == 0 then return 0 end
call('ZADD', P .. 'score', call('INCR', P .. 'clock') + tonumber(ARGV[2]), ARGV[1])
return 1
"""
)

DELETE = (
    _PRELUDE
    + """
if call('EXISTS', P .. 'v:' .. ARGV[1]) == 0 then return 0 end
drop_version(ARGV[1])
return 1
"""
)

REAP = _PRELUDE + "return reap()"
